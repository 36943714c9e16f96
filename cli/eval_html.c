#include "eval.h"
int eval_write_html(const eval_run *run, const eval_row *rows, size_t num_rows, const char *path)
{ (void)run; (void)rows; (void)num_rows; return cli_write_file(path, "x", 1); }
