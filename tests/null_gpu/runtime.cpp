// The CUDA runtime without a GPU: device memory is the host's, copies are real, kernels do nothing, all is done at once.
//
// torch's real CUDA build runs over it: its dispatcher, caching allocators, autograd threads, streams, events and choice
// of kernels. Numbers mean nothing: what a kernel would have computed is whatever the memory holds, and what is
// read of a few numbers is above 0. What build.py finds undefined in torch's libraries and not here returns 0.
//
//   NULL_GPUS=2             devices (0: torch says that there is none, and computes on the CPU)
//   NULL_GPU_GIB=139        memory of each
//   NULL_GPU_OTHERS_GIB=100 of it, held by other programs
//   NULL_GPU_EXPANDS=1      the driver has virtual memory, so torch may have expandable segments
//   NULL_GPU_FAULT=w1:4000:214
//                           device of the worker w1 (VARUNA_WORKER; * is any process): at its 4,000th launch, and from
//                           then on, that error (214 ECC, 700 illegal address, 710 assert), or: "hang", no event of it
//                           is ever reached; "memory", the first new allocation from then on is refused, and
//                           so are torch's further tries, after it has freed what it kept

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <thread>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kContextBytes = 500u << 20;  // what a context takes of a device
constexpr size_t kFewBytes = 256;              // of numbers that are read

size_t gib(const char* variable, double otherwise) {
  return (size_t)((getenv(variable) ? atof(getenv(variable)) : otherwise) * (1ull << 30));
}
size_t total_bytes() {
  static const size_t bytes = gib("NULL_GPU_GIB", 139);
  return bytes;
}
size_t room_bytes() {
  static const size_t bytes = total_bytes() - gib("NULL_GPU_OTHERS_GIB", 0) - kContextBytes;
  return bytes;
}

int device_count() {
  static const int count = getenv("NULL_GPUS") ? atoi(getenv("NULL_GPUS")) : 0;
  return count;
}

// In the order of tests/null_gpu/counts.py.
enum Count {
  kLaunches, kMatmuls, kStreamSyncs, kEventSyncs, kDeviceSyncs, kReads, kPageableReads, kPageableWrites, kMallocs,
  kEvents, kRecords, kReadBytes, kWrittenBytes, kDeviceBytes, kPeakDeviceBytes, kPinnedBytes, kPeakPinnedBytes, kCounts
};
std::atomic<long> counts[kCounts];

void raise_to(Count peak, long now) {
  if (now > counts[peak]) counts[peak] = now;
}

struct Fault {
  long at = -1;           // launch; -1: never
  int error = 0;          // of CUDA
  bool hangs = false, is_memory = false;

  Fault() {
    const char *given = getenv("NULL_GPU_FAULT"), *worker = getenv("VARUNA_WORKER");
    if (!given) return;
    const std::string text(given);
    const size_t first = text.find(':'), second = text.find(':', first + 1);
    const std::string who = text.substr(0, first), how = text.substr(second + 1);
    if (who != "*" && (!worker || who != worker)) return;
    at = std::stol(text.substr(first + 1, second - first - 1));
    hangs = how == "hang", is_memory = how == "memory";
    if (!hangs && !is_memory) error = std::stoi(how);
  }

  bool has_begun() const { return at >= 0 && counts[kLaunches] >= at; }
};

const Fault& fault() {
  static const Fault found;
  return found;
}

cudaError_t health() { return fault().error && fault().has_begun() ? (cudaError_t)fault().error : cudaSuccess; }

void wait_if_hung() {
  while (fault().hangs && fault().has_begun()) std::this_thread::sleep_for(std::chrono::seconds(1));
}

enum Kind { kPageable, kPinned, kDevice };
struct Block { size_t bytes; Kind kind; int device; };
std::mutex blocks_lock;
std::map<uintptr_t, Block> blocks;
thread_local int current = 0;

Block block_of(const void* pointer) {
  std::lock_guard<std::mutex> guard(blocks_lock);
  auto after = blocks.upper_bound((uintptr_t)pointer);
  if (after == blocks.begin()) return {0, kPageable, -1};
  const auto& [begin, block] = *--after;
  return (uintptr_t)pointer < begin + block.bytes ? block : Block{0, kPageable, -1};
}

void note(void* pointer, Block block) {
  std::lock_guard<std::mutex> guard(blocks_lock);
  blocks[(uintptr_t)pointer] = block;
  const auto [now, peak] = block.kind == kDevice ? std::pair(kDeviceBytes, kPeakDeviceBytes)
                                                 : std::pair(kPinnedBytes, kPeakPinnedBytes);
  raise_to(peak, counts[now] += block.bytes);
}

void* pages(size_t* bytes) {
  *bytes = (*bytes + 4095) & ~(size_t)4095;
  void* found = mmap(nullptr, *bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return found == MAP_FAILED ? nullptr : found;
}

cudaError_t forget(void* pointer, bool unmap) {
  if (!pointer) return cudaSuccess;
  std::lock_guard<std::mutex> guard(blocks_lock);
  auto found = blocks.find((uintptr_t)pointer);
  if (found == blocks.end()) return cudaErrorInvalidValue;
  counts[found->second.kind == kDevice ? kDeviceBytes : kPinnedBytes] -= found->second.bytes;
  if (unmap) munmap(pointer, found->second.bytes);
  blocks.erase(found);
  return cudaSuccess;
}

cudaError_t copy(void* to, const void* from, size_t bytes) {
  if (auto error = health()) return error;
  const Kind target = block_of(to).kind, source = block_of(from).kind;
  if (source == kDevice && target != kDevice) {
    counts[kReads]++, counts[kReadBytes] += bytes;
    if (target == kPageable) counts[kPageableReads]++, wait_if_hung();
    if (bytes <= 8 || (bytes <= kFewBytes && target == kPageable)) {  // losses, counts or truths, which no kernel has computed
      memset(to, 0x3f, bytes);  // true, a whole number above 0, or a fraction: 0.747 in fp32
      return cudaSuccess;
    }
  } else if (target == kDevice && source != kDevice) {
    counts[kWrittenBytes] += bytes;
    if (source == kPageable) counts[kPageableWrites]++;
  }
  memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t launch() {
  counts[kLaunches]++;
  return health();
}

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Event { double recorded_ms; };
std::atomic<uintptr_t> streams{0x1000};
thread_local struct { dim3 grid, block; size_t shared; void* stream; } configuration;

}  // namespace

// ---- for tests

EXPORT long null_gpu_count(int which) { return counts[which]; }
EXPORT void null_gpu_restart() {
  for (int which = 0; which < kDeviceBytes; which++) counts[which] = 0;
  counts[kPeakDeviceBytes] = counts[kDeviceBytes].load();
  counts[kPeakPinnedBytes] = counts[kPinnedBytes].load();
}
EXPORT void null_gpu_launched(int matmuls) { launch(), counts[kMatmuls] += matmuls; }  // by libraries

// ---- memory

static bool has_room(size_t bytes) {
  static std::atomic<long> refused_at{-1};
  long none = -1;
  if (fault().is_memory && fault().has_begun()) refused_at.compare_exchange_strong(none, counts[kLaunches]);
  const bool refused = refused_at >= 0 && refused_at == counts[kLaunches];
  return !refused && counts[kDeviceBytes] + bytes <= room_bytes();
}
EXPORT cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  if (auto error = health()) return error;
  counts[kMallocs]++;
  *pointer = nullptr;
  if (!has_room(bytes)) return cudaErrorMemoryAllocation;
  if (!(*pointer = pages(&bytes))) return cudaErrorMemoryAllocation;
  note(*pointer, {bytes, kDevice, current});
  return cudaSuccess;
}
EXPORT cudaError_t cudaFree(void* pointer) { return forget(pointer, true); }
EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  if (!(*pointer = pages(&bytes))) return cudaErrorMemoryAllocation;
  note(*pointer, {bytes, kPinned, current});
  return cudaSuccess;
}
EXPORT cudaError_t cudaFreeHost(void* pointer) { return forget(pointer, true); }
EXPORT cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  note(pointer, {bytes, kPinned, current});
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostUnregister(void* pointer) { return forget(pointer, false); }
EXPORT cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  *total = total_bytes(), *free_bytes = room_bytes() - counts[kDeviceBytes];
  return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  const Block block = block_of(pointer);
  memset(found, 0, sizeof *found);
  found->device = block.device;
  found->type = block.kind == kDevice ? cudaMemoryTypeDevice
                : block.kind == kPinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  if (block.kind != kPageable) found->devicePointer = (void*)pointer;
  if (block.kind == kPinned) found->hostPointer = (void*)pointer;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return copy(to, from, bytes);
}
EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return copy(to, from, bytes);
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
  return copy(to, from, bytes);
}
EXPORT cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  memset(to, value, bytes);
  return health();
}
EXPORT cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  memset(to, value, bytes);
  return health();
}
EXPORT cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  static char room[1 << 20];
  *pointer = room;
  return cudaSuccess;
}

// ---- devices: an H200 (sm_90) each

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return *count ? cudaSuccess : cudaErrorNoDevice;
}
EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
  current = device;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = device_count() ? CUDART_VERSION : 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  snprintf(text, bytes, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  memset(found, 0, sizeof *found);
  strcpy(found->name, "Null H200");
  for (int i = 0; i < 16; i++) found->uuid.bytes[i] = (char)(device * 16 + i + 1);
  found->totalGlobalMem = total_bytes();
  found->major = 9;
  found->multiProcessorCount = 132;
  found->warpSize = 32;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = 232448;
  found->sharedMemPerMultiprocessor = 233472;
  found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  found->totalConstMem = 65536;
  found->textureAlignment = 512;
  found->l2CacheSize = 62914560;
  found->memoryBusWidth = 6144;
  found->pciBusID = device + 1;
  found->asyncEngineCount = 3;
  found->concurrentKernels = found->unifiedAddressing = found->cooperativeLaunch = found->clusterLaunch = 1;
  found->canMapHostMemory = found->streamPrioritiesSupported = found->hostRegisterSupported = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  cudaDeviceProp of;
  cudaGetDeviceProperties(&of, device);
  switch (which) {
    case cudaDevAttrMultiProcessorCount: *value = of.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = of.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = of.minor; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = of.maxThreadsPerBlock; break;
    case cudaDevAttrWarpSize: *value = of.warpSize; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = of.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = of.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = of.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = of.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = of.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrL2CacheSize: *value = of.l2CacheSize; break;
    case cudaDevAttrMaxGridDimX: *value = of.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = of.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *value = of.maxGridSize[2]; break;
    case cudaDevAttrCooperativeLaunch: *value = 1; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 3201000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = of.memoryBusWidth; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

// ---- streams and events: what is recorded has been reached

EXPORT cudaError_t cudaDeviceSynchronize() {
  counts[kDeviceSyncs]++, wait_if_hung();
  return health();
}
static cudaError_t new_stream(cudaStream_t* stream) {
  *stream = (cudaStream_t)(streams += 16);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) { return new_stream(stream); }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return new_stream(stream); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return new_stream(stream); }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t) {
  return fault().hangs && fault().has_begun() ? cudaErrorNotReady : health();
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t) {
  counts[kStreamSyncs]++, wait_if_hung();
  return health();
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                            cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* with, unsigned) {
  call(stream, cudaSuccess, with);
  return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void* with) {
  call(with);
  return cudaSuccess;
}
static cudaError_t new_event(cudaEvent_t* event) {
  counts[kEvents]++;
  *event = (cudaEvent_t) new Event{0};
  return cudaSuccess;
}
static cudaError_t record(cudaEvent_t event) {
  counts[kRecords]++;
  ((Event*)event)->recorded_ms = now_ms();
  return health();
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return new_event(event); }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return new_event(event); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) { return record(event); }
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t, unsigned) { return record(event); }
EXPORT cudaError_t cudaEventQuery(cudaEvent_t) {
  return fault().hangs && fault().has_begun() ? cudaErrorNotReady : health();
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t) {
  counts[kEventSyncs]++, wait_if_hung();
  return health();
}
EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  *ms = (float)(((Event*)to)->recorded_ms - ((Event*)from)->recorded_ms);
  return cudaSuccess;
}

// ---- kernels

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->binaryVersion = found->ptxVersion = 90;
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) {
  *count = 2;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t,
                                                                          unsigned) {
  *count = 2;
  return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return launch(); }
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch();
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { return launch(); }
EXPORT cudaError_t __cudaLaunchKernel(void*, dim3, dim3, void**, size_t, void*) { return launch(); }
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
  *(void**)stream = configuration.stream;
  return cudaSuccess;
}
EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
EXPORT cudaError_t __cudaGetKernel(void** kernel, const void* function) {
  *kernel = (void*)function;
  return cudaSuccess;
}
EXPORT cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void*, cudaJitOption*, void**, unsigned,
                                       cudaLibraryOption*, void**, unsigned) {
  *library = (cudaLibrary_t)1;
  return cudaSuccess;
}
static int is_not_supported() { return 801; }
// torch looks all of them up as soon as it needs one, such as to say that a device is out of memory.
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* found) {
  const bool lacks = !strncmp(name, "cuMem", 5) && !getenv("NULL_GPU_EXPANDS");
  *function = lacks ? nullptr : dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = (void*)is_not_supported;
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetLastError() { return health(); }
EXPORT cudaError_t cudaPeekAtLastError() { return health(); }
EXPORT const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }
EXPORT const char* cudaGetErrorString(cudaError_t error) {
  switch ((int)error) {
    case 2: return "out of memory";
    case 100: return "no CUDA-capable device is detected";
    case 101: return "invalid device ordinal";
    case 214: return "uncorrectable ECC error encountered";
    case 700: return "an illegal memory access was encountered";
    case 702: return "the launch timed out and was terminated";
    case 710: return "device-side assert triggered";
    case 719: return "unspecified launch failure";
    default: return "unknown error";
  }
}

// ---- the driver and the libraries, as far as torch asks them for more than success

static int handle(void** made) {
  *made = malloc(256);
  return 0;
}
EXPORT int cuCtxGetCurrent(void** context) { return handle(context); }
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) {
  if (flags) *flags = 0;
  if (is_active) *is_active = device == 0;
  return 0;
}
EXPORT int nvmlInit() { return 0; }  // asked for the number of devices by a process that will fork
EXPORT int cuGetErrorString(int error, const char** text) {
  *text = error == 2 ? "out of memory" : "operation not supported";
  return 0;
}
EXPORT int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute != 128;  // handles of a fabric
  return 0;
}
EXPORT int cuMemGetAllocationGranularity(size_t* bytes, const void*, int) {
  *bytes = 2u << 20;
  return 0;
}
EXPORT int cuMemAddressReserve(uintptr_t* pointer, size_t bytes, size_t, uintptr_t, unsigned long long) {
  void* found = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return 2;
  std::lock_guard<std::mutex> guard(blocks_lock);
  blocks[*pointer = (uintptr_t)found] = {bytes, kDevice, current};
  return 0;
}
EXPORT int cuMemAddressFree(uintptr_t pointer, size_t bytes) {
  std::lock_guard<std::mutex> guard(blocks_lock);
  blocks.erase(pointer);
  return munmap((void*)pointer, bytes);
}
EXPORT int cuMemCreate(unsigned long long* made, size_t bytes, const void*, unsigned long long) {
  counts[kMallocs]++;
  if (health() || !has_room(bytes)) return 2;
  raise_to(kPeakDeviceBytes, counts[kDeviceBytes] += bytes);
  *made = bytes;  // all that anyone asks of it
  return 0;
}
EXPORT int cuMemRelease(unsigned long long made) {
  counts[kDeviceBytes] -= made;
  return 0;
}
EXPORT int cuMemMap(uintptr_t pointer, size_t bytes, size_t, unsigned long long, unsigned long long) {
  return mprotect((void*)pointer, bytes, PROT_READ | PROT_WRITE);
}
EXPORT int cuMemSetAccess(uintptr_t, size_t, const void*, size_t) { return 0; }
EXPORT int cuMemUnmap(uintptr_t pointer, size_t bytes) {
  return madvise((void*)pointer, bytes, MADV_DONTNEED) | mprotect((void*)pointer, bytes, PROT_NONE);
}
EXPORT int nvmlInit_v2() { return 0; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = CUDART_VERSION;
  return 0;
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { return handle(device); }
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) { return 3; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 3; }
EXPORT int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { return *count = 0; }
EXPORT int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = device_count();
  return 0;
}
EXPORT int cublasCreate_v2(void** made) { return handle(made); }
EXPORT int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0; }
EXPORT int cublasGetMathMode(void*, int* mode) { return *mode = 0; }
EXPORT int cublasLtCreate(void** made) { return handle(made); }
EXPORT size_t cublasLtGetVersion() { return 130101; }
EXPORT int cublasLtMatmulDescCreate(void** made, int, int) { return handle(made); }
EXPORT int cublasLtMatmulPreferenceCreate(void** made) { return handle(made); }
EXPORT int cublasLtMatrixLayoutCreate(void** made, int, unsigned long, unsigned long, long) { return handle(made); }
struct Heuristic { unsigned long algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };
EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, Heuristic* found,
                                          int* count) {
  memset(found, 0, sizeof *found);
  found->waves = 1, *count = 1;
  return 0;
}
EXPORT int cudnnCreate(void** made) { return handle(made); }
EXPORT size_t cudnnGetVersion() { return 92600; }
EXPORT int cudnnGetProperty(int which, int* value) {
  *value = which == 0 ? 9 : which == 1 ? 26 : 0;
  return 0;
}
