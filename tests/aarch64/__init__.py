"""The wheel, its kernels and a training on 64-bit Arm, in an emulator: `make aarch64`."""
