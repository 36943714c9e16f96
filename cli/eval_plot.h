/* SPDX-License-Identifier: Apache-2.0 */
/* eval_plot.h - a small line plot as SVG, coloured by the page's style sheet, so that it follows light and dark. */
#ifndef AKV_CLI_EVAL_PLOT_H
#define AKV_CLI_EVAL_PLOT_H

#include "eval.h"

enum { PLOT_MAX_SERIES = 5, PLOT_MAX_POINTS = EVAL_MAX_WAYS };

typedef struct plot_point {
    double x, y;
    double low, high; /* whisker; both equal to y = none */
    char name[48];    /* shown when pointed at */
} plot_point;

typedef struct plot_series {
    const char *name;
    plot_point points[PLOT_MAX_POINTS]; /* ascending in x */
    size_t num_points;
} plot_series;

typedef struct plot {
    const char *title;
    const char *y_label;
    bool log_y;   /* else linear, from 0 or below */
    bool percent; /* y is shown times 100 */
    double rule;  /* a dashed horizontal line; NAN = none */
    const char *rule_name;
    plot_series series[PLOT_MAX_SERIES]; /* the place decides colour and mark; empty ones are left out */
} plot;

/* printf into a buffer; false when out of memory. */
bool page_add(cli_buffer *page, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same text with &, <, > and quotes made harmless, and bytes that are no UTF-8 replaced. */
bool page_text(cli_buffer *page, const char *text);

/* x is the ratio, on a logarithmic axis. Nothing is drawn when no series has a point. */
bool plot_draw(cli_buffer *page, const plot *p);

#endif
