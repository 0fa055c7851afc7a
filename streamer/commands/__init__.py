"""The command line: `up-streamer`, or `python -m streamer.commands.cli`. Only this package prints and exits.

cli        the commands put together, main            run      run, usubscription: what serves until it is told to end
terminal   printing, errors, ending                   check    what a configuration says, and the files that it names
options    of several commands, networks              client   subscribe, publish, call
drives     replay, demo
cursors  history  operating    what a streamer keeps, and for whom
"""
