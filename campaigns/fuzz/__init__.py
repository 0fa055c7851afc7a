"""Fuzzing: every decoder of the product, fed with what nobody wrote on purpose.

corpus/TARGET/* --mutate (atheris, else mutate.py)--> input --TARGET--> the documented refusal, or
                                                                   |    decoded, and the same again when encoded
                                                                   '--> anything else, too slow, too big: a find,
                                                                        kept in out/fuzz

docs/fuzzing.md says how to run it. `registry` holds the targets, which stand in wires (networks), services (core
services) and files.
"""
