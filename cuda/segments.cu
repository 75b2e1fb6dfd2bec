// Windows over several physical allocations of GPU memory: puts and gets across the boundaries.
#include "common/crossing.cuh"

namespace segments_program {

#if HAVE_GET
PROGRAM(segments) {
    // A third begins in the middle of a segment in the first, at a boundary in the second.
    cross_boundaries<ncclGin_SegmentDevice>(rank, "window of 10 segments, puts then gets", std::vector<Where>(10, Where::GPU));
    cross_boundaries<ncclGin_SegmentDevice>(rank, "window of 6 segments, puts then gets", std::vector<Where>(6, Where::GPU));
}
#else
PROGRAM(segments) { throw Absent("this NCCL takes no window over several physical allocations"); }
#endif

}  // namespace segments_program
