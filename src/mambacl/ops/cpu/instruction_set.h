// The scan for both number types with vectors of BYTES, in the namespace that surrounds this line.
namespace f32 {
typedef float T;
#define SINGLE
#include "lanes.h"
#include "tiles.h"
#include "forward.h"
#include "backward.h"
#undef SINGLE
}  // namespace f32
namespace f64 {
typedef double T;
#include "lanes.h"
#include "tiles.h"
#include "forward.h"
#include "backward.h"
}  // namespace f64
