// kernel_body.h for both number types, in the namespace that surrounds this line.
namespace f32 {
typedef float T;
#define SINGLE
#include "kernel_body.h"
#undef SINGLE
}  // namespace f32
namespace f64 {
typedef double T;
#include "kernel_body.h"
}  // namespace f64
