// Softmax and its gradients of few rows that are long: the parts of a row are spread over the GPU.
//
// Two launches on any GPU: the first reduces each part, the second unites what the parts of a row
// came to, in every block that has one, and writes that part. As `online`, three trips to memory,
// and as gradients of long rows, five.
//
// x (rows, columns) -> states (rows, parts) -> output[0] (rows, columns), or one or two entries a
// row; gradients as in backward.cu. Grid: a block of one team for each part of a row at a time; any
// multiple of p.parts is right. Dynamic shared memory: what a team's reductions need.
#include "softmax/backward.cuh"
#include "softmax/online.cuh"

namespace cuflash {

template <typename T, Layout kLayout>
__global__ void __launch_bounds__(kMaxThreads, 1)
    split_states(const __grid_constant__ SoftmaxParameters p) {
    using State = OnlineSoftmax<Accumulator<T>>;
    CUFLASH_DYNAMIC_SHARED(unsigned char, memory);
    Team<kLayout, Parts> team(p, memory);
    State* states = static_cast<State*>(p.states) + team.blocks().rank();
    for (int64 row = first_row(team); row < p.rows; row += row_step(team)) {
        const State state = team.unite_lanes(state_of_lane<T>(p, team, Place(p, row)));
        if (team.lane == 0) states[row * p.parts] = state;
    }
}

template <typename T, typename Operation, Layout kLayout>
__global__ void __launch_bounds__(kMaxThreads, 1)
    split(const __grid_constant__ SoftmaxParameters p) {
    using State = OnlineSoftmax<Accumulator<T>>;
    CUFLASH_DYNAMIC_SHARED(unsigned char, memory);
    Team<kLayout, Parts> team(p, memory);
    for (int64 row = first_row(team); row < p.rows; row += row_step(team)) {
        const State* states = static_cast<const State*>(p.states) + row * p.parts;
        State lane = State::identity();
        for (int part = team.lane; part < p.parts; part += team.lanes)
            lane = lane.merge(states[part]);
        const Operation operation(team.unite_lanes(lane));
        write_result<T, kLayout>(p, team, Place(p, row), operation);
    }
}

template <typename T, typename Gradient, Layout kLayout>
__global__ void __launch_bounds__(kMaxThreads, 1)
    split_sums(const __grid_constant__ SoftmaxParameters p) {
    CUFLASH_DYNAMIC_SHARED(unsigned char, memory);
    vjp_of_rows<T, Gradient, kLayout, 0, Parts, kSums>(p, memory);
}

template <typename T, typename Gradient, Layout kLayout>
__global__ void __launch_bounds__(kMaxThreads, 1)
    split_vjp(const __grid_constant__ SoftmaxParameters p) {
    CUFLASH_DYNAMIC_SHARED(unsigned char, memory);
    vjp_of_rows<T, Gradient, kLayout, 0, Parts, kGradients>(p, memory);
}

}  // namespace cuflash
