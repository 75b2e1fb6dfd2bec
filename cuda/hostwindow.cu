// Windows in host memory, and in host and GPU memory at once: physical allocations of the driver. NCCL takes no others
// (cudaHostAlloc, malloc): it exports every segment's handle.
#include "common/crossing.cuh"

namespace hostwindow_program {

#if HAVE_GET
PROGRAM(hostwindow) {
    cross_boundaries<ncclGin_SegmentHostNuma>(rank, "host memory, puts then gets", std::vector<Where>(6, Where::HOST));
    const Where g = Where::GPU, h = Where::HOST;
    cross_boundaries<ncclGin_SegmentMixed>(rank, "host and GPU memory, puts then gets", {g, h, h, g, g, h});
}
#else
PROGRAM(hostwindow) { throw Absent("this NCCL takes no window in host memory"); }
#endif

}  // namespace hostwindow_program
