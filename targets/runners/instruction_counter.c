// A plugin for qemu's user-mode emulation that tells how many instructions a program had executed at each of its marks.
// A mark is getppid(MARK), a system call that changes nothing. The counts go, a line each, to the file of the argument
// into=FILE. What is used of the interface (version 1: qemu 4.2 to 8) is declared here, as packages of qemu ship no header.
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
enum qemu_plugin_op { QEMU_PLUGIN_INLINE_ADD_U64 };
typedef struct qemu_info_t qemu_info_t;
typedef void (*translated_t)(qemu_plugin_id_t, struct qemu_plugin_tb*);
typedef void (*called_t)(qemu_plugin_id_t, unsigned int, int64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                         uint64_t, uint64_t, uint64_t);
extern void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, translated_t);
extern void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb*, enum qemu_plugin_op, void*, uint64_t);
extern void qemu_plugin_register_vcpu_syscall_cb(qemu_plugin_id_t, called_t);
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb*);

int qemu_plugin_version = 1;

static const int64_t GETPPID = 173;  // of aarch64
static const uint64_t MARK = 0x61747472;
static uint64_t executed;
static FILE* counts;

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb* block) {
  (void)id;
  size_t instructions = qemu_plugin_tb_n_insns(block);
  qemu_plugin_register_vcpu_tb_exec_inline(block, QEMU_PLUGIN_INLINE_ADD_U64, &executed, instructions);
}

static void called(qemu_plugin_id_t id, unsigned int cpu, int64_t number, uint64_t first, uint64_t second,
                   uint64_t third, uint64_t fourth, uint64_t fifth, uint64_t sixth, uint64_t seventh, uint64_t eighth) {
  (void)id, (void)cpu, (void)second, (void)third, (void)fourth, (void)fifth, (void)sixth, (void)seventh, (void)eighth;
  if (number != GETPPID || first != MARK) return;
  fprintf(counts, "%llu\n", (unsigned long long)executed);
  fflush(counts);
}

int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t* info, int argc, char** argv) {
  (void)info;
  if (argc != 1 || strncmp(argv[0], "into=", 5) != 0) return 1;
  counts = fopen(argv[0] + 5, "w");
  if (counts == NULL) return 1;
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_vcpu_syscall_cb(id, called);
  return 0;
}
