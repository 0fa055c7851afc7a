"""The demo: demo.py runs it, drive.py makes or reads a drive, replay.py publishes it, processes.py starts
processes, mosquitto.py a broker."""
