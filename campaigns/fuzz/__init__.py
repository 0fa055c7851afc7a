"""Fuzzing: every decoder of the product runs with random and damaged input.

corpus/TARGET/* --mutate (atheris, else mutate.py)--> input --TARGET--> the documented refusal, or
                                                                   |    decoded, and the same when encoded again
                                                                   '--> anything else, too slow, too big: a find,
                                                                        kept in out/fuzz

docs/fuzzing.md says how to run it. `registry` holds the targets, which are defined in wires (networks), services (core
services), files, edge and grip (HTTP).
"""
