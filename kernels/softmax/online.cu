// Softmax with the online update: one pass that finds maximum and normalizer together, one that
// normalises (Milakov and Gimelshein 2018, algorithm 3). Three trips to memory, rows of any length.
//
// x (rows, columns) -> output[0] (rows, columns), or one or two entries a row.
// Grid: blocks of one or more teams (rows.cuh), each row by row; any number of blocks is right.
// Dynamic shared memory: what a team's reductions need.
#include "softmax/online.cuh"

namespace cuflash {

template <typename T, typename Operation, Layout kLayout>
__global__ void __launch_bounds__(kMaxThreads, 1)
    online(const __grid_constant__ SoftmaxParameters p) {
    CUFLASH_DYNAMIC_SHARED(unsigned char, memory);
    Team<kLayout> team(p, memory);
    for (int64 first = first_row(team); first < p.rows; first += row_step(team)) {
        const int64 row = first + team.slot;
        const Place place(p, row < p.rows ? row : 0);
        auto lane = OnlineSoftmax<Accumulator<T>>::identity();
        if (row < p.rows) lane = state_of_lane<T>(p, team, place);
        const auto state = team.unite_lanes(lane);
        if (row < p.rows) write_result<T, kLayout>(p, team, place, Operation(state));
    }
}

}  // namespace cuflash
