"""The parts of a streamer: what each of them loads, runs, reports and takes over (`Part` in streamer/part.py).

order.py              The parts in the order in which they start, and why each is where it is
storage.py            The logs and the disk
tracing.py            Spans of traced messages
letters.py            Dead letters: list, resend, purge
losses.py             Gaps, dropped messages, stores that are new
readiness.py          The states of the streamer and its endpoints; rates and lags
pumps.py              Positions toward each endpoint; pauses; claims of endpoints that are away or not configured
senders.py            The traffic of each source authority, and the clocks of the senders
endpoints.py          The endpoints: their tasks, whose uSubscription is asked there, and how they come and go
control.py            Pause and resume by RPC
log_level.py          Another level of the log, for a while
history.py            The history service; epochs
usubscription.py      The embedded uSubscription, which starts as soon as the disk allows it
interest.py           Who has subscribed to what; subscriptions without a rule
following.py          Histories that are followed, and our history handed over
edge.py               The HTTP edge
recovery.py           Recovery sources, and the gates of their topics
certificates.py       When certificates expire
unmatched.py          Patterns of the configuration that match nothing
status.py             What a streamer does, and why: one object; backups
reloading.py          Takes over a changed configuration while the streamer runs
admin.py              The admin port
ports.py              What the parts with an HTTP port do the same
"""
