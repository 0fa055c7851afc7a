"""The command line: `up-streamer`, or `python -m streamer.commands.cli`. Only this package prints and exits.

cli            the commands put together, main        terminal       printing, errors, ending
options        what several commands ask for          network        a network, and who we are on it
run  check     the streamer; files: what `check` looks at            usubscription  a service of its own
client  replay history                                an ordinary uEntity on one network; messages: what one says
cursors  dispatch  letters  subscriptions             what a streamer keeps, and for whom
"""
