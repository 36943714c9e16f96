/* SPDX-License-Identifier: Apache-2.0 */
/* eval_plot.c - see eval_plot.h. */
#include "eval_plot.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 640, HEIGHT = 340, LEFT = 64, RIGHT = 16, TOP = 14, BOTTOM = 48 };

bool page_add(cli_buffer *page, const char *format, ...)
{
    char text[2048];
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return n >= 0 && (size_t)n < sizeof text && cli_buffer_add(page, text, (size_t)n);
}

bool page_text(cli_buffer *page, const char *text)
{
    static const struct {
        char from;
        const char *to;
    } special[] = {{'&', "&amp;"}, {'<', "&lt;"}, {'>', "&gt;"}, {'"', "&quot;"}, {'\'', "&#39;"}};
    bool ok = true;
    size_t bytes = strlen(text);
    while (ok && bytes != 0) {
        const size_t good = cli_utf8_prefix(text, bytes);
        for (size_t i = 0; ok && i < good; i++) {
            const char *to = NULL;
            for (size_t s = 0; s < sizeof special / sizeof special[0]; s++)
                if (text[i] == special[s].from)
                    to = special[s].to;
            ok = to != NULL ? cli_buffer_add(page, to, strlen(to)) : cli_buffer_add(page, text + i, 1);
        }
        text += good;
        bytes -= good;
        if (ok && bytes != 0) {
            ok = cli_buffer_add(page, "\xef\xbf\xbd", 3);
            text++;
            bytes--;
        }
    }
    return ok;
}

/* ------------------------------------------------------------------------------------------------------------ axes */

typedef struct axis {
    double low, high;
    bool log;
    double from, to; /* pixels */
} axis;

static double place(const axis *a, double v)
{
    const double low = a->log ? log(a->low) : a->low, high = a->log ? log(a->high) : a->high;
    const double x = a->log ? log(v > a->low ? v : a->low) : v;
    return a->from + (x - low) / (high - low) * (a->to - a->from);
}

/* 1, 2, 5 (fine: 1, 2, 3, 5, 7) times a power of ten: the next one after v, or v itself. */
static double round_up(double v, bool fine)
{
    static const double coarse_steps[] = {1.0, 2.0, 5.0, 10.0}, fine_steps[] = {1.0, 2.0, 3.0, 5.0, 7.0, 10.0};
    const double *steps = fine ? fine_steps : coarse_steps, power = pow(10.0, floor(log10(v) + 1e-9));
    size_t i = 0;
    while (steps[i] < 10.0 && steps[i] * power < v * (1.0 - 1e-9))
        i++;
    return steps[i] * power;
}

static size_t ticks(const axis *a, double out[32])
{
    size_t n = 0;
    if (a->log) {
        const bool fine = a->high < 300.0 * a->low;
        for (double v = round_up(a->low, fine); v <= a->high * (1.0 + 1e-9) && n < 32; v = round_up(v * 1.001, fine))
            out[n++] = v;
        return n;
    }
    const double step = round_up((a->high - a->low) / 6.0, false);
    for (double k = ceil(a->low / step - 1e-9); k * step <= a->high + 1e-9 * step && n < 32; k += 1.0)
        out[n++] = k * step + 0.0; /* no -0 */
    return n;
}

static void spread(const plot *p, axis *x, axis *y)
{
    double low_x = INFINITY, high_x = 0.0, low_y = INFINITY, high_y = -INFINITY;
    for (size_t s = 0; s < PLOT_MAX_SERIES; s++) {
        for (size_t i = 0; i < p->series[s].num_points; i++) {
            const plot_point *q = &p->series[s].points[i];
            low_x = fmin(low_x, q->x);
            high_x = fmax(high_x, q->x);
            low_y = fmin(low_y, p->log_y && q->low <= 0.0 ? q->y : q->low);
            high_y = fmax(high_y, q->high);
        }
    }
    if (!isnan(p->rule)) {
        low_y = fmin(low_y, p->rule);
        high_y = fmax(high_y, p->rule);
    }
    *x = (axis){low_x / 1.15, high_x * 1.15, true, LEFT, WIDTH - RIGHT};
    if (p->log_y) {
        low_y = fmax(low_y, 1e-7);
        *y = (axis){low_y / 1.4, fmax(high_y, low_y) * 1.4, true, HEIGHT - BOTTOM, TOP};
    } else {
        low_y = fmin(low_y, 0.0);
        high_y = fmax(high_y, low_y + 1e-6);
        *y = (axis){low_y - (low_y < 0.0 ? 0.05 * (high_y - low_y) : 0.0), high_y + 0.05 * (high_y - low_y), false,
                    HEIGHT - BOTTOM, TOP};
    }
}

static bool draw_axes(cli_buffer *page, const plot *p, const axis *x, const axis *y)
{
    double at[32];
    bool ok = true;
    size_t n = ticks(y, at);
    for (size_t i = 0; ok && i < n; i++) {
        const double v = place(y, at[i]);
        ok = page_add(page,
                      "<line class=\"grid\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/><text class=\"end\" x=\"%d\" "
                      "y=\"%.1f\">%.4g%s</text>\n",
                      LEFT, WIDTH - RIGHT, v, v, LEFT - 8, v + 4.0, (p->percent ? 100.0 : 1.0) * at[i],
                      p->percent ? " %" : "");
    }
    n = ticks(x, at);
    for (size_t i = 0; ok && i < n; i++)
        ok = page_add(
            page,
            "<line class=\"axis\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\"/><text class=\"middle\" x=\"%.1f\" "
            "y=\"%d\">%gx</text>\n",
            place(x, at[i]), place(x, at[i]), HEIGHT - BOTTOM, HEIGHT - BOTTOM + 5, place(x, at[i]),
            HEIGHT - BOTTOM + 20, at[i]);
    ok = ok && page_add(page, "<line class=\"axis\" x1=\"%d\" x2=\"%d\" y1=\"%d\" y2=\"%d\"/>\n", LEFT, WIDTH - RIGHT,
                        HEIGHT - BOTTOM, HEIGHT - BOTTOM);
    return ok && page_add(page,
                          "<text class=\"middle\" x=\"%d\" y=\"%d\">times smaller than the 16-bit cache, everything "
                          "counted</text>\n",
                          (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8);
}

/* ---------------------------------------------------------------------------------------------------------- series */

/* Colour is not the only difference: every series has its own mark. */
static bool draw_mark(cli_buffer *page, size_t style, double x, double y, double r)
{
    switch (style) {
    case 0:
        return page_add(page, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"%.1f\"/>", x, y, r);
    case 1:
        return page_add(page, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"/>", x - r, y - r, 2 * r,
                        2 * r);
    case 2:
        return page_add(page, "<path d=\"M%.1f %.1fl%.1f %.1fh%.1fz\"/>", x, y - r * 1.2, r * 1.15, r * 2.1, -r * 2.3);
    case 3:
        return page_add(page, "<path d=\"M%.1f %.1fl%.1f %.1fl%.1f %.1fl%.1f %.1fz\"/>", x, y - r * 1.35, r * 1.35,
                        r * 1.35, -r * 1.35, r * 1.35, -r * 1.35, -r * 1.35);
    default:
        return page_add(page, "<path d=\"M%.1f %.1fl%.1f %.1fh%.1fz\"/>", x, y + r * 1.2, r * 1.15, -r * 2.1, -r * 2.3);
    }
}

static bool draw_series(cli_buffer *page, const plot *p, size_t style, const axis *x, const axis *y)
{
    const plot_series *s = &p->series[style];
    bool ok = page_add(page, "<g class=\"s%zu\">", style);
    if (s->num_points > 1) {
        ok = ok && page_add(page, "<polyline points=\"");
        for (size_t i = 0; ok && i < s->num_points; i++)
            ok = page_add(page, "%.1f,%.1f ", place(x, s->points[i].x), place(y, s->points[i].y));
        ok = ok && page_add(page, "\"/>");
    }
    for (size_t i = 0; ok && i < s->num_points; i++) {
        const plot_point *q = &s->points[i];
        const double at = place(x, q->x);
        if (q->low != q->high)
            ok = page_add(page, "<line class=\"whisker\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>", at, at,
                          place(y, q->low), place(y, q->high));
        ok = ok && page_add(page, "<g>") && draw_mark(page, style, at, place(y, q->y), 4.5) &&
             page_add(page, "<title>") && page_text(page, q->name) &&
             page_add(page, ", %.2fx: %.4g%s</title></g>", q->x, (p->percent ? 100.0 : 1.0) * q->y,
                      p->percent ? " %" : "");
    }
    return ok && page_add(page, "</g>\n");
}

static bool draw_legend(cli_buffer *page, const plot *p)
{
    bool ok = page_add(page, "<p class=\"legend\">");
    for (size_t s = 0; ok && s < PLOT_MAX_SERIES; s++) {
        if (p->series[s].num_points == 0)
            continue;
        ok = page_add(page, "<span><svg width=\"16\" height=\"14\" aria-hidden=\"true\"><g class=\"s%zu\">", s) &&
             draw_mark(page, s, 8.0, 7.0, 4.5) && page_add(page, "</g></svg> ") && page_text(page, p->series[s].name) &&
             page_add(page, "</span> ");
    }
    if (ok && !isnan(p->rule))
        ok = page_add(
                 page,
                 "<span><svg width=\"22\" height=\"14\" aria-hidden=\"true\"><line class=\"rule\" x1=\"0\" x2=\"22\" "
                 "y1=\"7\" y2=\"7\"/></svg> ") &&
             page_text(page, p->rule_name) && page_add(page, "</span>");
    return ok && page_add(page, "</p>\n");
}

bool plot_draw(cli_buffer *page, const plot *p)
{
    axis x, y;
    size_t points = 0;
    for (size_t s = 0; s < PLOT_MAX_SERIES; s++)
        points += p->series[s].num_points;
    if (points == 0)
        return true;
    spread(p, &x, &y);
    bool ok = page_add(page, "<figure><figcaption>") && page_text(page, p->title) &&
              page_add(page, "</figcaption>\n") &&
              page_add(page, "<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"", WIDTH, HEIGHT) &&
              page_text(page, p->title) && page_add(page, "\">\n") && draw_axes(page, p, &x, &y);
    ok = ok &&
         page_add(page, "<text class=\"middle\" transform=\"translate(14 %d) rotate(-90)\">",
                  (TOP + HEIGHT - BOTTOM) / 2) &&
         page_text(page, p->y_label) && page_add(page, "</text>\n");
    if (ok && !isnan(p->rule))
        ok = page_add(page, "<line class=\"rule\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>\n", LEFT, WIDTH - RIGHT,
                      place(&y, p->rule), place(&y, p->rule));
    for (size_t s = PLOT_MAX_SERIES; ok && s-- > 0;) /* the first series on top */
        if (p->series[s].num_points != 0)
            ok = draw_series(page, p, s, &x, &y);
    return ok && page_add(page, "</svg>\n") && draw_legend(page, p) && page_add(page, "</figure>\n");
}
