typedef int eval_plot_todo;
