"""The demo: demo.py runs it, vehicle.py is one vehicle of it, drive.py makes, reads and replays a drive, counts.py and
picture.py show the result, processes.py starts processes, mosquitto.py a broker."""
