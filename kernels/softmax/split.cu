// Softmax of few rows that are long: `online` with the parts of a row spread over the whole GPU.
//
// Two launches on any GPU, three trips to memory. The first makes the state of each part; the
// second unites a row's states, in every block that has a part of it, and normalises that part.
//
// x (rows, columns) -> states (rows, parts) -> output[0] (rows, columns), or one or two entries a
// row. Grid: a block of one team for each part of a row at a time; any multiple of p.parts is
// right. Dynamic shared memory: what a team's reductions need.
#include "softmax/online.cuh"

namespace cuflash {

// The blocks of a row, which share its columns and do not hear from each other.
class Parts {
  public:
    static constexpr bool kGather = false;

    __device__ __forceinline__ explicit Parts(const SoftmaxParameters& p) : count_(p.parts) {}
    __device__ __forceinline__ int count() const { return count_; }
    __device__ __forceinline__ int rank() const { return blockIdx.x % count_; }

  private:
    int count_;
};

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

}  // namespace cuflash
