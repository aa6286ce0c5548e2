// Softmax in one kernel that holds each row on chip: two trips to memory, one read and one write.
//
// kChunks > 0: every lane holds that many 16-byte chunks in registers, so that a row of up to
// lanes * kChunks * kVector<T> columns fits. kChunks = 0: the row lies in dynamic shared memory.
//
// x (rows, columns) -> output[0] (rows, columns), or one or two entries a row.
// Grid: blocks of one or more teams (rows.cuh), each row by row; any number of blocks is right.
// Dynamic shared memory: [scratch of the reductions: one accumulator a thread (across) or a warp,
// padded to 128 bytes][kChunks = 0: chunk i of thread t at i * blockDim.x + t; a block of one team
// has memory for the chunks of the row only].
#include "softmax/result.cuh"

namespace cuflash {

// The chunks of a row that one thread holds, in registers or in its own places of shared memory.
template <typename T, int kChunks>
struct Held {
    Vector<T> registers[kChunks > 0 ? kChunks : 1];
    Vector<T>* shared;

    __device__ __forceinline__ Vector<T>& operator[](int i) {
        return kChunks > 0 ? registers[i] : shared[i * blockDim.x + threadIdx.x];
    }
};

template <typename T, typename Operation, Layout kLayout, int kChunks>
__global__ void __launch_bounds__(kMaxThreads, 1)
    fused(const __grid_constant__ SoftmaxParameters p) {
    using A = Accumulator<T>;
    CUFLASH_DYNAMIC_SHARED(unsigned char, memory);
    const Team team(p);
    A* scratch = reinterpret_cast<A*>(memory);
    Held<T, kChunks> held;
    held.shared = reinterpret_cast<Vector<T>*>(memory + team.scratch_bytes<A>());

    for (int64 first = first_row(team); first < p.rows; first += row_step(team)) {
        int64 row = first + team.slot;
        bool active = row < p.rows;
        Place place(p, active ? row : 0);
        WhereRow<kLayout> where(p, p.where, place.where);

        OnlineSoftmax<A> state = OnlineSoftmax<A>::identity();
        if (active) {
            Row<T, kLayout> x(p, p.input[0], place.input[0]);
            for_each_chunk<T, kChunks>(p, team, [&](int i, int64 column) {
                held[i] = x.load(column, where, lowest<T>());
            });
            for_each_chunk<T, kChunks>(p, team,
                                       [&](int i, int64) { state.m = largest(state.m, held[i]); });
        }
        state.m = team.all_reduce(state.m, scratch, Maximum{});
        if (active) {
            CompensatedSum<A> l;
            for_each_chunk<T, kChunks>(p, team,
                                       [&](int i, int64) { l.push(sum_weights(state, held[i])); });
            state.l = l.sum;
        }
        state.l = team.all_reduce(state.l, scratch, Plus{});
        if (!active) continue;

        Operation operation(state);
        if constexpr (Operation::kColumns) {
            Row<T, kLayout> y(p, p.output[0], place.output[0]);
            for_each_chunk<T, kChunks>(p, team, [&](int i, int64 column) {
                y.store(column, evaluate<T>(operation, held[i], where, column));
            });
        } else if (team.lane == 0) {
            operation.template write<T>(p, place);
        }
    }
}

}  // namespace cuflash
