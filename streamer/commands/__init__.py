"""What `up-streamer` can do on the command line: cli.py parses, prints and exits; the others do the work."""
