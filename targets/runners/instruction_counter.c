// A plugin for qemu's user-mode emulation that tells what a program executed between its last two marks.
// A mark is getppid(MARK), a system call that changes nothing. Into the file of the argument into=FILE go, at each mark,
// the number of marks so far, and a line for each block of code that ran since the last one: its address, how often it
// ran, and its bytes. What is used of the interface (version 1: qemu 4.2 to 8) is declared here, as packages of qemu
// ship no header.
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum qemu_plugin_op { QEMU_PLUGIN_INLINE_ADD_U64 };
typedef struct qemu_info_t qemu_info_t;
typedef void (*translated_t)(qemu_plugin_id_t, struct qemu_plugin_tb*);
typedef void (*called_t)(qemu_plugin_id_t, unsigned int, int64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                         uint64_t, uint64_t, uint64_t);
extern void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, translated_t);
extern void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb*, enum qemu_plugin_op, void*, uint64_t);
extern void qemu_plugin_register_vcpu_syscall_cb(qemu_plugin_id_t, called_t);
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb*);
extern uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb*);
extern struct qemu_plugin_insn* qemu_plugin_tb_get_insn(const struct qemu_plugin_tb*, size_t);
extern const void* qemu_plugin_insn_data(const struct qemu_plugin_insn*);

int qemu_plugin_version = 1;

enum { GETPPID = 173, BYTES = 4 };  // of aarch64: the system call's number, and how long an instruction is
static const uint64_t MARK = 0x61747472;

struct block {
  struct block* before;
  uint64_t address, executed, told;  // told: how often it had run at the last mark
  size_t bytes;
  unsigned char code[];
};
static struct block* blocks;
static unsigned int marks;
static const char* into;

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb* translation) {
  (void)id;
  size_t instructions = qemu_plugin_tb_n_insns(translation);
  struct block* made = calloc(1, sizeof *made + BYTES * instructions);
  if (made == NULL) abort();
  made->before = blocks;
  made->address = qemu_plugin_tb_vaddr(translation);
  made->bytes = BYTES * instructions;
  for (size_t i = 0; i < instructions; ++i)
    memcpy(made->code + BYTES * i, qemu_plugin_insn_data(qemu_plugin_tb_get_insn(translation, i)), BYTES);
  blocks = made;
  qemu_plugin_register_vcpu_tb_exec_inline(translation, QEMU_PLUGIN_INLINE_ADD_U64, &made->executed, 1);
}

static void called(qemu_plugin_id_t id, unsigned int cpu, int64_t number, uint64_t first, uint64_t second,
                   uint64_t third, uint64_t fourth, uint64_t fifth, uint64_t sixth, uint64_t seventh, uint64_t eighth) {
  (void)id, (void)cpu, (void)second, (void)third, (void)fourth, (void)fifth, (void)sixth, (void)seventh, (void)eighth;
  if (number != GETPPID || first != MARK) return;
  FILE* counts = fopen(into, "w");
  if (counts == NULL) abort();
  fprintf(counts, "%u\n", ++marks);
  for (struct block* each = blocks; each != NULL; each = each->before) {
    if (each->executed == each->told) continue;
    fprintf(counts, "%llu %llu ", (unsigned long long)each->address, (unsigned long long)(each->executed - each->told));
    for (size_t i = 0; i < each->bytes; ++i) fprintf(counts, "%02x", each->code[i]);
    fprintf(counts, "\n");
    each->told = each->executed;
  }
  fclose(counts);
}

int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t* info, int argc, char** argv) {
  (void)info;
  if (argc != 1 || strncmp(argv[0], "into=", 5) != 0) return 1;
  into = strdup(argv[0] + 5);
  if (into == NULL) return 1;
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_vcpu_syscall_cb(id, called);
  return 0;
}
