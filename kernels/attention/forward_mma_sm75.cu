// forward_mma by the matrix instructions of sm_75, which newer devices have too: float16, products
// of depth 8, tiles copied by loads and stores.
#define CUFLASH_SM75
#include "attention/forward_mma.cu"
