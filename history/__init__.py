"""The history: every message once, in one log, which is the egress queue, what subscribers ask, and Spark's offsets.

the log     log.py          Log: append, read, wait, who has confirmed what
            disk.py         its records in a file: writer, readers                ring.py      or in memory alone
            streams.py      its topics, and their numbers                         followed.py  its places in other logs
            chunk.py        the records of one commit; the newest of them in memory
the file    store.py        commits, retains     writer.py   its thread           reader.py    reading it in others
            opening.py, load.py, rows.py, retention.py
damage      damage.py       what is known to be lost     gaps.py   told on a topic
            salvage.py, verify.py     what can still be read of a damaged file

the service service.py      core.ustreamer: Poll                                  describe.py  and Describe
            followers.py    Command: who follows what, leased                     pushing.py   frames to them
            thinning.py     sample periods                                        batch.py     records in a reply
            asked.py        what a poll asks for
            matches.py      which streams are meant, and may be seen              numbers.py   very many of them
            consumers.py    whose a consumer's name is                            witness.py   proof of a reader's place
            publisher.py    HistoryPublisher: keeps what it publishes, and serves it
epochs      keeper.py       who keeps them: which each record is of, how far they have come, in the log
            epochs.py, frontier.py    without I/O: of a group, of one stream of times
            snapshot.py     how far they had come where a poll begins             assembling.py   all of one, or none
its client  client.py       HistoryClient: calls, frames                          follow.py    one conversation
            subscriber.py   GaplessSubscriber                                     feed.py      listeners, fed from it
            acceptor.py     each record once, in order, nothing after one that is missing
"""

import uprotocol as uprotocol  # first of all: it decides whether what follows is imported as machine code
