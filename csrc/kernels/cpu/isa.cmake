# Adds csrc/kernels/cpu to fusewire_kernels: one source, compiled once per instruction set.
