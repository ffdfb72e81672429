// cuDNN as far as torch asks it before it decides not to use it: its version.
#include <cstddef>

extern "C" {

size_t cudnnGetVersion(void) { return CUDNN_VERSION_CODE; }

size_t cudnnGetCudartVersion(void) { return 13000; }

}  // extern "C"
