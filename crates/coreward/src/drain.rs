//! The commands `coreward drain` and `coreward undrain`.

use std::time::Duration;

use anyhow::{anyhow, bail};
use coreward_api::types::{ActiveDrain, DrainOrigin, DrainServer, DrainStatus, ServerState};
use coreward_http::Problem;
use coreward_http::client::ControllerClient;
use tokio::time::{Instant, sleep, timeout_at};

use crate::{CommandOutputFormat, ControllerQueryArgs, print_to_stdout};

/// Interval between status requests of `--wait`. It is half a second, because agents count connections every second.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Maximum of `--timeout`. A longer timeout is reduced to it.
const MAX_DRAIN_TIMEOUT: Duration = Duration::from_secs(365 * 86_400);

#[derive(clap::Args)]
pub struct DrainArgs {
    /// Name of the server in the fleet document
    server: String,
    #[command(flatten)]
    query: ControllerQueryArgs,
    /// Drain the server in this service only; may be repeated [default: all services, also future ones]
    #[arg(long, value_name = "NAME", num_args = 1..)]
    service: Vec<String>,
    /// Drain the server even if no other server of a service takes new connections: the service then gets none
    #[arg(long)]
    force: bool,
    /// Wait until the server has no connections, and print their number whenever it changes
    #[arg(long)]
    wait: bool,
    /// Maximum time to wait; after it the command fails, and the server stays drained
    #[arg(long, value_name = "TIME", default_value = "10m", requires = "wait")]
    timeout: humantime::Duration,
}

#[derive(clap::Args)]
pub struct UndrainArgs {
    /// Name of the server in the fleet document
    server: String,
    #[command(flatten)]
    query: ControllerQueryArgs,
}

fn build_runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

/// Drains the server, and waits if requested. Fails if the controller rejects the drain, or if the wait times out.
pub fn run_drain(args: &DrainArgs) -> anyhow::Result<()> {
    let client = args.query.contact.build_client()?;
    build_runtime()?.block_on(async {
        let request = DrainServer { services: args.service.clone(), force: args.force };
        let status = client.drain_server(&args.server, &request).await?;
        // The JSON output must be a single object, which is the final state.
        let is_text_output = args.query.format == CommandOutputFormat::Text;
        if is_text_output || !args.wait {
            print_to_stdout(&format_drain_status(&status, args.query.format)?)?;
        }
        if !args.wait {
            return Ok(());
        }
        let drain_notice = format!("{} stays drained: `coreward undrain {}` ends that", args.server, args.server);
        tokio::select! {
            outcome = wait_until_drained(&client, status, args.timeout.into(), is_text_output) => {
                let (status, remaining_connections) = outcome?;
                if !is_text_output {
                    print_to_stdout(&format_drain_status(&status, args.query.format)?)?;
                }
                match remaining_connections {
                    RemainingDrainConnections::Zero => Ok(()),
                    RemainingDrainConnections::NonzeroWithDescription(remaining_text) => {
                        Err(anyhow!("{remaining_text} after {}; {drain_notice}", args.timeout))
                    }
                }
            }
            _ = tokio::signal::ctrl_c() => Err(anyhow!("interrupted; {drain_notice}")),
        }
    })
}

/// Runs `coreward undrain`, which ends the drain of a server. Fails if the controller rejects the request.
pub fn run_undrain(args: &UndrainArgs) -> anyhow::Result<()> {
    let client = args.query.contact.build_client()?;
    print_to_stdout(&format_drain_status(
        &build_runtime()?.block_on(client.undrain_server(&args.server))?,
        args.query.format,
    )?)
}

/// Connections of the drained server that remain at the end of the wait.
enum RemainingDrainConnections {
    Zero,
    NonzeroWithDescription(String),
}

/// Waits until no connection remains or the timeout expires. Continues while no controller answers, because the drain
/// is already stored.
async fn wait_until_drained(
    client: &ControllerClient,
    mut status: DrainStatus,
    timeout: Duration,
    is_text_output: bool,
) -> anyhow::Result<(DrainStatus, RemainingDrainConnections)> {
    let deadline = Instant::now() + timeout.min(MAX_DRAIN_TIMEOUT);
    let (server, mut printed_text, mut is_controller_unreachable) =
        (status.server.clone(), describe_drain(&status), false);
    loop {
        if status.drain.is_none() && status.state != ServerState::Gone {
            bail!("{server} is no longer drained: another command ended the drain");
        }
        if status.remaining_connections == Some(0) {
            return Ok((status, RemainingDrainConnections::Zero));
        }
        sleep(DRAIN_POLL_INTERVAL.min(deadline - Instant::now())).await;
        let Ok(answer) = timeout_at(deadline, client.drain_status(&server)).await else { break };
        match answer {
            Ok(newest_status) => (status, is_controller_unreachable) = (newest_status, false),
            Err(error) if is_permanent_error(&error) => return Err(error),
            Err(error) => {
                if !std::mem::replace(&mut is_controller_unreachable, true) && is_text_output {
                    print_to_stdout(&format!("the drain is on record, what remains is not known: {error:#}"))?;
                    printed_text.clear();
                }
            }
        }
        if !is_controller_unreachable && is_text_output {
            print_status_if_changed(&status, &mut printed_text)?;
        }
        if Instant::now() >= deadline && status.remaining_connections != Some(0) {
            break;
        }
    }
    let remaining_text = describe_remaining_connections(&status, is_controller_unreachable);
    Ok((status, RemainingDrainConnections::NonzeroWithDescription(remaining_text)))
}

/// Prints the drain status unless its text equals the last printed text.
fn print_status_if_changed(status: &DrainStatus, printed_text: &mut String) -> anyhow::Result<()> {
    let current_text = describe_drain(status);
    if current_text != *printed_text {
        print_to_stdout(&current_text)?;
        *printed_text = current_text;
    }
    Ok(())
}

/// Returns whether the controller's rejection is permanent, so that another attempt would be useless.
fn is_permanent_error(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Problem>().is_some_and(|problem| matches!(problem.status, 400..=407 | 422))
}

fn describe_remaining_connections(status: &DrainStatus, is_controller_unreachable: bool) -> String {
    match status.remaining_connections {
        _ if is_controller_unreachable => "what remains is not known (the controller does not answer)".to_owned(),
        Some(1) => "1 connection remains".to_owned(),
        Some(connection_count) => format!("{connection_count} connections remain"),
        None => format!("what remains is not known (waiting for {})", status.unknown_count_reasons.join("; ")),
    }
}

fn format_drain_status(status: &DrainStatus, format: CommandOutputFormat) -> anyhow::Result<String> {
    match format {
        CommandOutputFormat::Json => Ok(serde_json::to_string_pretty(status)?),
        CommandOutputFormat::Text => Ok(describe_drain(status)),
    }
}

/// Returns a line such as "s1 is draining by command: 12 connections remain (api 2, web 10)".
fn describe_drain(status: &DrainStatus) -> String {
    let DrainStatus { server, .. } = status;
    let Some(drain) = &status.drain else {
        if status.state == ServerState::Gone {
            return format!(
                "{server} has left the fleet's document: {}",
                describe_remaining_connections(status, false)
            );
        }
        let reason = if status.state_reason.is_empty() { String::new() } else { format!(" ({})", status.state_reason) };
        return format!("{server} is {}{reason}", status.state);
    };
    let remaining_text = match status.remaining_connections {
        Some(0) => "no connection remains".to_owned(),
        _ => describe_remaining_connections(status, false),
    };
    let connections_by_service: Vec<String> = match (&status.connection_counts, status.remaining_connections) {
        (Some(connection_counts), Some(1..)) => {
            let is_drained_service = |service: &String| drain.services.is_empty() || drain.services.contains(service);
            let services_with_connections = connection_counts
                .connections_by_service
                .iter()
                .filter(|(service, count)| **count > 0 && is_drained_service(service));
            services_with_connections.map(|(service, count)| format!("{service} {count}")).collect()
        }
        _ => Vec::new(),
    };
    let connections_by_service = if connections_by_service.len() < 2 {
        String::new()
    } else {
        format!(" ({})", connections_by_service.join(", "))
    };
    let uncounted_services_text = match status.uncounted_services.as_slice() {
        [] => String::new(),
        services => format!("; flows of UDP are not counted ({})", services.join(", ")),
    };
    let state = if status.remaining_connections == Some(0) { "drained" } else { "draining" };
    format!(
        "{server} is {state}{}: {remaining_text}{connections_by_service}{uncounted_services_text}",
        format_origin_and_services(drain)
    )
}

fn format_origin_and_services(drain: &ActiveDrain) -> String {
    let origin_text = match drain.origin {
        DrainOrigin::Command => "",
        DrainOrigin::Document => " by the fleet's document",
    };
    let services_text =
        if drain.services.is_empty() { String::new() } else { format!(" in {}", drain.services.join(", ")) };
    format!("{origin_text}{services_text}")
}

#[cfg(test)]
mod tests {
    use coreward_api::types::{ConnectionCounts, ReportState};

    use super::*;

    fn drain_status_with_remaining(remaining: Option<u64>) -> DrainStatus {
        DrainStatus {
            server: "s1".into(),
            state: ServerState::Draining,
            state_reason: "by `coreward drain`".into(),
            report_state: ReportState::Fresh,
            drain: Some(ActiveDrain { origin: DrainOrigin::Command, since_unix_ms: Some(1), services: Vec::new() }),
            remaining_connections: remaining,
            unknown_count_reasons: if remaining.is_none() {
                vec!["a count that begins now".into()]
            } else {
                Vec::new()
            },
            connection_counts: Some(ConnectionCounts {
                age_ms: 5,
                connections_by_service: [("api".to_owned(), 2), ("web".to_owned(), 10)].into(),
            }),
            uncounted_services: Vec::new(),
        }
    }

    #[test]
    fn remaining_connections_are_described() {
        assert_eq!(
            describe_drain(&drain_status_with_remaining(Some(12))),
            "s1 is draining: 12 connections remain (api 2, web 10)"
        );
        assert_eq!(describe_drain(&drain_status_with_remaining(Some(0))), "s1 is drained: no connection remains");
        let drained_in_web =
            Some(ActiveDrain { origin: DrainOrigin::Command, since_unix_ms: Some(1), services: vec!["web".into()] });
        let status_drained_in_web = DrainStatus {
            drain: drained_in_web,
            remaining_connections: Some(1),
            ..drain_status_with_remaining(Some(1))
        };
        assert_eq!(describe_drain(&status_drained_in_web), "s1 is draining in web: 1 connection remains");
        let status_with_udp_service =
            DrainStatus { uncounted_services: vec!["dns".into()], ..drain_status_with_remaining(Some(0)) };
        assert_eq!(
            describe_drain(&status_with_udp_service),
            "s1 is drained: no connection remains; flows of UDP are not counted (dns)"
        );
        assert_eq!(
            describe_drain(&drain_status_with_remaining(None)),
            "s1 is draining: what remains is not known (waiting for a count that begins now)"
        );
        let active_status = DrainStatus {
            drain: None,
            state: ServerState::Active,
            state_reason: String::new(),
            ..drain_status_with_remaining(None)
        };
        assert_eq!(describe_drain(&active_status), "s1 is active");
    }

    #[test]
    fn request_rejected_by_controller_is_not_retried() {
        use coreward_http::ProblemKind;
        let is_permanent = |kind| is_permanent_error(&Problem::new(kind, "").into());
        assert!(is_permanent(ProblemKind::NotFound) && is_permanent(ProblemKind::Forbidden));
        assert!(
            !is_permanent(ProblemKind::NotLeading)
                && !is_permanent(ProblemKind::Internal)
                && !is_permanent(ProblemKind::TooManyRequests)
        );
        assert!(!is_permanent_error(&anyhow!("no controller answers")));
    }
}
