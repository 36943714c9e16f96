/* SPDX-License-Identifier: Apache-2.0 */
/*
 * count.c - a plugin of qemu-user (7.x) that counts executed instructions by function: qemu gives no times. count.sh builds and uses
 * it. Debian has no header of the interface, so what is used of it is declared here.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
EXPORT int qemu_plugin_version = 1;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t index);
const char *qemu_plugin_insn_symbol(const struct qemu_plugin_insn *insn);
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, void (*translated)(uint64_t id, struct qemu_plugin_tb *tb));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *tb, int add_u64, void *counter, uint64_t number);
void qemu_plugin_register_atexit_cb(uint64_t id, void (*ended)(uint64_t id, void *opaque), void *opaque);
EXPORT int qemu_plugin_install(uint64_t id, const void *info, int argc, char **argv);

enum { MOST = 4096 };
static struct {
    char name[64];
    uint64_t count;
} functions[MOST];
static int num_functions;

static void translated(uint64_t id, struct qemu_plugin_tb *tb)
{
    const char *name = qemu_plugin_insn_symbol(qemu_plugin_tb_get_insn(tb, 0));
    int i = 0;
    (void)id;
    if (name == NULL)
        name = "(none)";
    while (i < num_functions && strncmp(functions[i].name, name, sizeof functions[i].name - 1) != 0)
        i++;
    if (i == MOST) {
        fprintf(stderr, "count: more than %d functions\n", MOST);
        exit(2);
    }
    if (i == num_functions)
        snprintf(functions[num_functions++].name, sizeof functions[i].name, "%s", name);
    qemu_plugin_register_vcpu_tb_exec_inline(tb, 0, &functions[i].count, qemu_plugin_tb_n_insns(tb));
}

static void ended(uint64_t id, void *opaque)
{
    (void)id, (void)opaque;
    for (int i = 0; i < num_functions; i++)
        fprintf(stderr, "count %s %llu\n", functions[i].name, (unsigned long long)functions[i].count);
}

int qemu_plugin_install(uint64_t id, const void *info, int argc, char **argv)
{
    (void)info, (void)argc, (void)argv;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, ended, NULL);
    return 0;
}
