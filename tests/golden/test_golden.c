/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_golden.c - every file of tests/golden/v1 does what expected.tsv says: good ones open, decode and attend within
 * the bounds of the reference, whose figures are the recorded ones; bad ones are refused with the recorded status and
 * sentence. Whatever is added to the folder without a line in the list fails.
 */
#include "akv_test.h"
#include "check_segment.h"
#include "golden.h"

#include <dirent.h>

static const char *const folder = AKV_GOLDEN_FOLDER;
static unsigned long good, bad;

/* As in test_attend.c: fp32 rounding seen by plain loops times 8, bounded by theory. */
static double tolerance(const ref_row_result *row)
{
    return fmin(row->tol_out, 8 * row->plain + 4 * REF_U + row->whole);
}

static void check_attend(const char *name, const akv_segment *segment)
{
    golden_attend a;
    akv_diag diag = {AKV_OK, ""};
    const akv_segment *list[1] = {segment};
    golden_attend_make(segment, list, &a);
    const uint32_t dv = a.params.head_dim_v;
    double *want = must(malloc(a.rows * dv * sizeof *want)), plain = 0;
    ref_row_result *rows = must(malloc(a.rows * sizeof *rows));
    must(ref_attend(&a.params, want, rows) ? want : NULL);
    size_t bytes = 0;
    CHECK_STATUS(akv_attend_workspace_bytes(&a.params, &bytes, &diag), AKV_OK, &diag);
    void *workspace = must(aligned_alloc(64, (bytes + 64) / 64 * 64));
    CHECK_STATUS(akv_attend(&a.params, workspace, bytes, &diag), AKV_OK, &diag);
    for (uint64_t r = 0; r < a.rows; r++)
        plain = fmax(plain, rows[r].plain);
    for (uint64_t r = 0; r < a.rows; r++) {
        rows[r].plain = plain;
        for (uint32_t i = 0; i < dv; i++)
            CHECK_NEAR(a.out[r * dv + i], want[r * dv + i], tolerance(&rows[r]), "%s: attention, row %llu, %u", name,
                       (unsigned long long)r, i);
    }
    free(workspace);
    free(rows);
    free(want);
    golden_attend_free(&a);
}

static void visit(const char *name, const akv_segment *segment, void *opaque)
{
    check_decode(name, segment);
    check_attend(name, segment);
    golden_add(segment, opaque);
}

static void check_figure(const char *name, const char *what, double got, double want)
{
    /* doubles, summed in the same order: another libm may differ in a last bit of an exponential or a sine */
    CHECK_NEAR(got, want, 1e-9 * (1 + fabs(want)), "%s: %s", name, what);
}

static void check_file(const char *name, int status, const char *text)
{
    char path[4096];
    size_t bytes = 0;
    akv_diag diag = {AKV_OK, ""};
    golden_figures got = {0, 0, 0}, want = {0, 0, 0};
    snprintf(path, sizeof path, "%s/%s", folder, name);
    uint8_t *data = golden_read(path, &bytes);
    const akv_status is = golden_open(name, data, bytes, visit, &got, &diag);
    CHECK_MSG((int)is == status, "%s: status %d (%s), expected %d", name, (int)is, diag.message, status);
    if (status == AKV_OK) {
        good++;
        CHECK_MSG(sscanf(text, "%lf %lf %lf", &want.keys, &want.values, &want.attend) == 3, "%s: no figures: %s", name,
                  text);
        check_figure(name, "keys", got.keys, want.keys);
        check_figure(name, "values", got.values, want.values);
        check_figure(name, "attention", got.attend, want.attend);
    } else {
        bad++;
        CHECK_MSG(strcmp(diag.message, text) == 0, "%s:\n    says      %s\n    expected  %s", name, diag.message, text);
    }
    free(data);
}

static void files(void)
{
    char path[4096], line[1024], seen[256][64];
    size_t listed = 0, there = 0;
    snprintf(path, sizeof path, "%s/" GOLDEN_EXPECTED, folder);
    FILE *list = fopen(path, "r");
    if (!CHECK_MSG(list != NULL, "%s is missing", path))
        return;
    while (fgets(line, sizeof line, list) != NULL) {
        char *name = strtok(line, "\t"), *status = strtok(NULL, "\t"), *text = strtok(NULL, "\n");
        if (line[0] == '#')
            continue;
        if (!CHECK_MSG(text != NULL && listed < 256 && strlen(name) < 64, "a line of %s is not NAME, STATUS, TEXT",
                       path))
            break;
        strcpy(seen[listed++], name);
        check_file(name, atoi(status), text);
    }
    fclose(list);
    DIR *dir = opendir(folder);
    for (struct dirent *e; dir != NULL && (e = readdir(dir)) != NULL;) {
        if (strstr(e->d_name, ".akv") == NULL)
            continue;
        bool known = false;
        for (size_t i = 0; i < listed; i++)
            known = known || strcmp(seen[i], e->d_name) == 0;
        CHECK_MSG(known, "%s has no line in %s", e->d_name, GOLDEN_EXPECTED);
        there++;
    }
    if (dir != NULL)
        closedir(dir);
    CHECK_MSG(there == listed, "%zu files, %zu lines", there, listed);
    printf("  %lu files open, %lu are refused\n", good, bad);
    CHECK(good >= 15 && bad >= 50);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    TEST(files);
    return TEST_DONE();
}
