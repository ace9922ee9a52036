//! Output of `coreward status`, `explain`, `keys`, `apply` and `fleet`, with answers from a controller's API.

mod explain;
pub mod fleet;
mod keys;
mod status;
#[cfg(test)]
mod tests;

use coreward_api::types::{Explain, Keys, RotateKeys};
use coreward_http::client::ControllerClient;
use serde::Serialize;

use coreward_fleet::clock::wall_clock_time;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RenderedOutputFormat {
    Text,
    /// One JSON object, for other programs to read.
    Json,
}

/// Returns the output of `coreward status`. With `include_rss_keys`, JSON output includes full RSS keys. Fails if the
/// controller cannot be reached, or if it rejects the request.
pub fn fetch_status(
    client: &ControllerClient,
    include_rss_keys: bool,
    format: RenderedOutputFormat,
) -> anyhow::Result<String> {
    let status = block_on(client.status(include_rss_keys))?;
    match format {
        RenderedOutputFormat::Text => Ok(status::format_status(&status, wall_clock_time())),
        RenderedOutputFormat::Json => to_json(&status),
    }
}

/// Returns the output of `coreward explain`. Fails if the controller cannot be reached, or if the service is unknown.
pub fn fetch_explanation(
    client: &ControllerClient,
    request: &Explain,
    format: RenderedOutputFormat,
) -> anyhow::Result<String> {
    let explanation = block_on(client.explain_packet(request))?;
    match format {
        RenderedOutputFormat::Text => Ok(explain::format_explanation(&explanation, request)),
        RenderedOutputFormat::Json => to_json(&explanation),
    }
}

/// Returns the output of `coreward keys show`. Fails if the controller cannot be reached.
pub fn fetch_keys(client: &ControllerClient, format: RenderedOutputFormat) -> anyhow::Result<String> {
    render_keys(&block_on(client.cookie_keys())?, format)
}

/// Begins or continues a key rotation, and returns the output of `coreward keys rotate`. Fails if the controller cannot
/// be reached, or if the rotation is neither safe now nor forced.
pub fn rotate_keys(client: &ControllerClient, force: bool, format: RenderedOutputFormat) -> anyhow::Result<String> {
    render_keys(&block_on(client.rotate_keys(&RotateKeys { force }))?, format)
}

fn render_keys(keys: &Keys, format: RenderedOutputFormat) -> anyhow::Result<String> {
    match format {
        RenderedOutputFormat::Text => Ok(keys::format_key_status(keys, wall_clock_time())),
        RenderedOutputFormat::Json => to_json(keys),
    }
}

/// Formats the document as JSON with line breaks and indentation.
fn to_json(document: &impl Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(document)?)
}

pub fn block_on<T>(future: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(future)
}
