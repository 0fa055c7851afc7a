"""The command line: `up-streamer`, or `python -m up_streamer`. Only this package prints and exits.

cli        all commands, main                         run      run, usubscription: processes that serve until a signal
terminal   printing, errors, exit codes               check    checks a configuration and the files that it names
connect    tries the networks of a configuration
options    shared options, networks                   client   subscribe, publish, call, replay, demo
backup  cursors  history  letters  operating  stored_files  stored_interest    the data that a streamer stores
status     what a running streamer does, and why
"""
