/* A stand-in for NVIDIA's libnvidia-ml.so.1, loaded by the real pynvml. Answers the calls that the
 * node agent makes from the folder named by FAKE_NVML, read anew at each call:
 *
 *   gpus     lines of words:
 *              gpu <index> <total> <used beyond its processes> <uuid> <name to the end of the line>
 *              process <index> compute|mps|graphics <pid> <bytes, or N/A>
 *              reserve <index> <bytes> that the driver keeps, beyond all else
 *              fail <call, as pynvml names it> <index, or -1 for any> <return code>
 *              hide <index>            lists no process of this GPU, as in some containers
 *   held/    one file named <index>.<pid> for each process that holds memory, with its bytes. It
 *            counts for as long as the process lives, as the driver frees what the dead held.
 *
 * Without the folder there is no driver. Functions, structures and return codes are nvml.h's. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, OPERATING_SYSTEM = 17 };
enum { GPUS = 8, PROCESSES = 64, WORD = 96, PATH = 512, NONE = -1 };
enum { COMPUTE, GRAPHICS, MPS };
#define NOT_AVAILABLE 0xFFFFFFFFFFFFFFFFULL /* pynvml turns it into None */

typedef unsigned long long bytes;
typedef struct { bytes total, free, used; } nvmlMemory_t;
typedef struct { unsigned version; bytes total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned pid; bytes used; unsigned gpu_instance, compute_instance; } nvmlProcessInfo_t;
typedef struct { int gpu, list; unsigned pid; bytes used; } process_t;
typedef struct { char call[WORD]; int gpu, code; } fault_t;
typedef struct { int known, hidden; bytes total, used, reserved; char uuid[WORD], name[WORD]; } gpu_t;

static _Thread_local struct { int gpus, processes, faults; gpu_t gpu[GPUS]; process_t process[PROCESSES];
                              fault_t fault[PROCESSES]; } now;
static int opened; /* how often */
static pid_t opener;
static int handles[GPUS]; /* a device's handle is the address of its place here */

/* A zombie has given its memory back. */
static int lives(unsigned pid) {
    char path[PATH], line[PATH] = "", *end;
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    if (!fgets(line, sizeof line, file)) line[0] = 0;
    fclose(file);
    return (end = strrchr(line, ')')) && end[2] != 'Z' && end[2] != 'X';
}

static void add(int gpu, int list, unsigned pid, bytes used) {
    if (now.processes < PROCESSES) {
        process_t found = {gpu, list, pid, used};
        now.process[now.processes++] = found;
    }
}

static void read_line(const char *line) {
    char kind[WORD], size[WORD], uuid[WORD], name[WORD];
    int gpu, code;
    unsigned pid;
    bytes total, used;
    if (sscanf(line, "gpu %d %llu %llu %95s %95[^\n]", &gpu, &total, &used, uuid, name) == 5) {
        if (gpu < 0 || gpu >= GPUS) return;
        now.gpu[gpu].known = 1, now.gpu[gpu].total = total, now.gpu[gpu].used = used;
        strcpy(now.gpu[gpu].uuid, uuid), strcpy(now.gpu[gpu].name, name);
        now.gpus = gpu + 1 > now.gpus ? gpu + 1 : now.gpus;
    } else if (sscanf(line, "process %d %95s %u %95s", &gpu, kind, &pid, size) == 4) {
        used = strcmp(size, "N/A") ? strtoull(size, NULL, 10) : NOT_AVAILABLE;
        add(gpu, !strcmp(kind, "graphics") ? GRAPHICS : !strcmp(kind, "mps") ? MPS : COMPUTE, pid, used);
    } else if (sscanf(line, "reserve %d %llu", &gpu, &used) == 2 && gpu >= 0 && gpu < GPUS) {
        now.gpu[gpu].reserved = used;
    } else if (sscanf(line, "hide %d", &gpu) == 1 && gpu >= 0 && gpu < GPUS) {
        now.gpu[gpu].hidden = 1;
    } else if (sscanf(line, "fail %95s %d %d", name, &gpu, &code) == 3 && now.faults < PROCESSES) {
        fault_t *fault = &now.fault[now.faults++];
        strcpy(fault->call, name), fault->gpu = gpu, fault->code = code;
    }
}

static void read_held(const char *folder) {
    char path[PATH];
    struct dirent *entry;
    snprintf(path, sizeof path, "%s/held", folder);
    DIR *held = opendir(path);
    while (held && (entry = readdir(held))) {
        int gpu;
        unsigned pid;
        bytes used;
        if (sscanf(entry->d_name, "%d.%u", &gpu, &pid) != 2 || !lives(pid)) continue;
        snprintf(path, sizeof path, "%s/held/%.64s", folder, entry->d_name);
        FILE *file = fopen(path, "r");
        if (file && fscanf(file, "%llu", &used) == 1) add(gpu, COMPUTE, pid, used);
        if (file) fclose(file);
    }
    if (held) closedir(held);
}

/* What the folder says now, and what a call on one GPU returns. */
static int answer(const char *call, int gpu) {
    char path[PATH], line[PATH];
    const char *folder = getenv("FAKE_NVML");
    memset(&now, 0, sizeof now);
    snprintf(path, sizeof path, "%s/gpus", folder ? folder : "");
    FILE *file = folder ? fopen(path, "r") : NULL;
    if (!file) return DRIVER_NOT_LOADED;
    if (opened && opener != getpid()) return fclose(file), OPERATING_SYSTEM; /* inherited by a fork */
    while (fgets(line, sizeof line, file)) read_line(line);
    fclose(file);
    read_held(folder);
    for (int i = 0; i < now.faults; i++)
        if (!strcmp(now.fault[i].call, call) && (now.fault[i].gpu < 0 || now.fault[i].gpu == gpu))
            return now.fault[i].code;
    if (gpu != NONE && (gpu < 0 || gpu >= GPUS || !now.gpu[gpu].known)) return INVALID_ARGUMENT;
    return SUCCESS;
}

static int index_of(const int *handle) { return (int)(handle - handles); }

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int code = answer("nvmlInit", NONE);
    if (code == SUCCESS && opened++ == 0) opener = getpid();
    return code;
}

int nvmlShutdown(void) { return opened && opened-- ? SUCCESS : UNINITIALIZED; }

const char *nvmlErrorString(int code) { (void)code; return "a return code of the fake library"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    int code = answer("nvmlDeviceGetCount", NONE);
    *count = (unsigned)now.gpus;
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, int **handle) {
    int code = answer("nvmlDeviceGetHandleByIndex", (int)index);
    if (code == SUCCESS) *handle = &handles[index];
    return code;
}

static int say(char *to, unsigned length, const char *text) {
    if (strlen(text) >= length) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

int nvmlDeviceGetName(const int *handle, char *name, unsigned length) {
    int code = answer("nvmlDeviceGetName", index_of(handle));
    return code ? code : say(name, length, now.gpu[index_of(handle)].name);
}

int nvmlDeviceGetUUID(const int *handle, char *uuid, unsigned length) {
    int code = answer("nvmlDeviceGetUUID", index_of(handle));
    return code ? code : say(uuid, length, now.gpu[index_of(handle)].uuid);
}

int nvmlDeviceGetMemoryInfo(const int *handle, nvmlMemory_t *memory) {
    int gpu = index_of(handle), code = answer("nvmlDeviceGetMemoryInfo", gpu);
    if (code) return code;
    bytes used = now.gpu[gpu].used + now.gpu[gpu].reserved;
    for (int i = 0; i < now.processes; i++)
        if (now.process[i].gpu == gpu && now.process[i].used != NOT_AVAILABLE)
            used += now.process[i].used;
    memory->total = now.gpu[gpu].total;
    memory->used = used < memory->total ? used : memory->total;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(const int *handle, nvmlMemory_v2_t *memory) {
    nvmlMemory_t first;
    int code = nvmlDeviceGetMemoryInfo(handle, &first);
    if (code) return code;
    memory->total = first.total, memory->free = first.free;
    memory->reserved = now.gpu[index_of(handle)].reserved;
    memory->used = first.used - memory->reserved;
    return SUCCESS;
}

/* Called twice by pynvml: for the count, and with an array that is larger. */
static int list(const char *call, const int *handle, int kind, unsigned *count,
                nvmlProcessInfo_t *infos) {
    int gpu = index_of(handle), code = answer(call, gpu);
    unsigned room = *count, found = 0;
    if (code) return code;
    for (int i = 0; i < now.processes && !now.gpu[gpu].hidden; i++) {
        const process_t *process = &now.process[i];
        if (process->gpu != gpu || process->list != kind) continue;
        if (infos && found < room) {
            nvmlProcessInfo_t info = {process->pid, process->used, ~0u, ~0u}; /* MIG is off */
            infos[found] = info;
        }
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(const int *handle, unsigned *count,
                                            nvmlProcessInfo_t *infos) {
    return list("nvmlDeviceGetComputeRunningProcesses", handle, COMPUTE, count, infos);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(const int *handle, unsigned *count,
                                             nvmlProcessInfo_t *infos) {
    return list("nvmlDeviceGetGraphicsRunningProcesses", handle, GRAPHICS, count, infos);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(const int *handle, unsigned *count,
                                               nvmlProcessInfo_t *infos) {
    return list("nvmlDeviceGetMPSComputeRunningProcesses", handle, MPS, count, infos);
}
