"""The demo: demo.py runs it, drive.py makes, reads and replays a drive, processes.py starts processes, mosquitto.py a
broker."""
