/* NCCL's logger is variadic; stable Rust cannot define such a function. This one formats the line and hands it on. */
#include <stdarg.h>
#include <stdio.h>

/* In log.rs. */
void oxygin_cli_log_line(int level, unsigned long subsys, const char *file, int line, const char *text);

void oxygin_cli_logger(int level, unsigned long subsys, const char *file, int line, const char *fmt, ...)
{
    char text[4096];
    va_list args;
    if (!fmt) {
        oxygin_cli_log_line(level, subsys, file, line, "(the plugin logged with a NULL format)");
        return;
    }
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    oxygin_cli_log_line(level, subsys, file, line, text);
}
