"""Runs gradwire's CUDA kernels, their own source, on a CPU: in any order of threads and CTAs, and watched for races.

`engine.cpp` runs a launch, with a fiber for each thread; `race.cpp` keeps a shadow of the memory that its threads
touch; `cuda_on_cpu.h` is what a kernel includes in the place of CUDA; `emulator` compiles and launches.
"""
