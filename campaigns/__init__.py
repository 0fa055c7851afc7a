"""The campaigns: programs that try the whole product from outside, each with its own command.

simulation/   whole gateways in virtual time, each world from a seed     make simulate
chaos/        real processes under kill -9, full disks, cut networks     make chaos
fuzz/         random input for every parser                              make fuzz
bench/        speed, processor time, memory                              make bench
"""
