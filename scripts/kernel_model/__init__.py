"""What the attention kernels would cost on chips that are not here, read from what the chips' own compilers say.

shapes.py      models and batches                     bundles.py    reads a TPU schedule
kernels.py     kernels at those shapes                simulate.py   runs the scalar part of one
compile_one.py one compile, in its own process        tpu_cost.py   figures of a TPU kernel
units.py       clocks and bandwidths                  gpu_cost.py   registers, spills, PTX of a GPU kernel
show.py        tables
"""
