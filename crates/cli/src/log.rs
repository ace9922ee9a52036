//! Log on standard error, as lines of text or as one JSON object per line.

use std::fmt;
use std::io::IsTerminal as _;
use std::time::SystemTime;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{self, Format, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Environment variable that selects the format of log lines: "text" (default) or "json".
const LOG_FORMAT_ENV_VARIABLE: &str = "COREWARD_LOG_FORMAT";

/// Starts logging to standard error. `RUST_LOG` sets the level (default: info), and `COREWARD_LOG_FORMAT=json` the
/// format. Returns a function that sets the level to debug for the crates of this project (`true`), or back to the
/// initial level (`false`).
/// Log lines that cannot be written, for example to a full disk, are lost. By default, tracing-subscriber would report
/// them with `eprintln!`, which would then panic.
pub fn start_logging() -> impl Fn(bool) + Send + Sync + 'static {
    let build_initial_filter = || EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let uses_colours = std::io::stderr().is_terminal();
    let format = match std::env::var(LOG_FORMAT_ENV_VARIABLE) {
        Ok(format) if format == "json" => LogFormat::Json,
        _ => LogFormat::Text(format::format().with_target(false).with_ansi(uses_colours)),
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(build_initial_filter())
        .with_ansi(uses_colours)
        .log_internal_errors(false);
    let builder = builder.event_format(format).with_writer(std::io::stderr).with_filter_reloading();
    let filter_handle = builder.reload_handle();
    builder.init();
    move |debug| {
        let new_filter = if debug { EnvFilter::new("info,coreward=debug") } else { build_initial_filter() };
        // This fails only if the subscriber has been dropped, but the subscriber lives as long as the process.
        let _ = filter_handle.reload(new_filter);
    }
}

enum LogFormat {
    Text(Format),
    /// One JSON object per line with `timestamp` (RFC 3339, UTC), `level`, `message`, and the event's fields by name.
    Json,
}

impl<S, N> FormatEvent<S, N> for LogFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        if let Self::Text(format) = self {
            return format.format_event(context, writer, event);
        }
        let mut fields = JsonLogFields(Map::new());
        let timestamp = humantime::format_rfc3339_micros(SystemTime::now()).to_string();
        fields.0.insert("timestamp".to_owned(), timestamp.into());
        fields.0.insert("level".to_owned(), event.metadata().level().as_str().into());
        event.record(&mut fields);
        writeln!(writer, "{}", Value::Object(fields.0))
    }
}

struct JsonLogFields(Map<String, Value>);

impl JsonLogFields {
    fn insert(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

impl Visit for JsonLogFields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.insert(field, format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.insert(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.insert(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.insert(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.insert(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.insert(field, value);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn json_log_lines_contain_the_fields_of_their_events() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let writer = Mutex::new(File::create(file.path()).unwrap());
        let subscriber = tracing_subscriber::fmt().event_format(LogFormat::Json).with_writer(writer).finish();
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(
                event = "server-state-changed",
                id = 7,
                ratio = 0.5,
                down = true,
                "s1 is \"down\":\nno answer"
            );
            tracing::info!("plain");
        });
        let text = fs::read_to_string(file.path()).unwrap();
        let mut lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        for line in &mut lines {
            let timestamp = line.as_object_mut().unwrap().remove("timestamp").unwrap();
            humantime::parse_rfc3339(timestamp.as_str().unwrap()).unwrap();
        }
        let expected = serde_json::json!([
            { "level": "WARN", "message": "s1 is \"down\":\nno answer", "event": "server-state-changed", "id": 7,
              "ratio": 0.5, "down": true },
            { "level": "INFO", "message": "plain" },
        ]);
        assert_eq!(Value::Array(lines), expected);
    }
}
