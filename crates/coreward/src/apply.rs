//! `coreward apply`, which shows the changes that another fleet document makes, asks for confirmation, and applies it.

use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use coreward_api::types::{Acknowledgements, PeerGeneration, RejectedUpdate};
use coreward_http::client::ControllerClient;
use coreward_render::block_on;
use coreward_render::fleet::{ProposedFleet, format_apply_result};

use crate::{CommandOutputFormat, ControllerQueryArgs, print_to_stdout};

#[derive(clap::Args)]
pub struct ApplyArgs {
    /// Fleet document to apply (docs/config.md)
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    query: ControllerQueryArgs,
    /// Apply without asking
    #[arg(long)]
    yes: bool,
    /// Only show the changes
    #[arg(long, conflicts_with = "yes")]
    dry_run: bool,
    /// Wait until the document is in force at all load balancers and all connected agents. Fails when a daemon rejects
    /// it, or when only disconnected load balancers remain, and names the daemons
    #[arg(long, conflicts_with = "dry_run")]
    wait: bool,
    /// Maximum time to wait
    #[arg(long, value_name = "TIME", default_value = "30s", requires = "wait")]
    timeout: humantime::Duration,
}

/// Interval of queries to the controller about which daemons have acknowledged the configuration.
const ACKNOWLEDGEMENT_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Runs `coreward apply`. Fails if the document is invalid, if the controller rejects it, or if the operator declines.
pub fn run_apply(args: &ApplyArgs) -> anyhow::Result<()> {
    let client = args.query.contact.build_client()?;
    let proposed_fleet = ProposedFleet::read_and_check(&client, &args.file)?;
    let is_applied = confirm_and_apply(proposed_fleet, args.query.format, (args.dry_run, args.yes))?;
    if is_applied && args.wait { wait_until_in_force(&client, args.timeout.into()) } else { Ok(()) }
}

/// Shows the changes, asks for confirmation, and applies the document. Returns whether the document is now in force.
fn confirm_and_apply(
    proposed_fleet: ProposedFleet,
    format: CommandOutputFormat,
    (dry_run, is_confirmed): (bool, bool),
) -> anyhow::Result<bool> {
    let only_shows_changes = dry_run || proposed_fleet.is_already_active();
    // The JSON output must be a single object, which is the result.
    if only_shows_changes || format == CommandOutputFormat::Text {
        print_to_stdout(&proposed_fleet.format_changes(format.into())?)?;
    }
    if only_shows_changes {
        return Ok(!dry_run);
    }
    // With JSON output the changes have not been shown, so the operator cannot confirm them.
    let can_ask_for_confirmation = format == CommandOutputFormat::Text;
    anyhow::ensure!(
        is_confirmed || can_ask_for_confirmation,
        "nothing was changed: `--format json` expects --yes or --dry-run"
    );
    anyhow::ensure!(is_confirmed || ask_for_confirmation()?, "nothing was changed");
    print_to_stdout(&format_apply_result(&proposed_fleet.apply()?, format.into())?)?;
    Ok(true)
}

fn wait_until_in_force(client: &ControllerClient, timeout: Duration) -> anyhow::Result<()> {
    let deadline = Instant::now() + timeout;
    loop {
        let acknowledgements = block_on(client.configuration_acknowledgements())?;
        if is_in_force_everywhere(&acknowledgements) {
            return Ok(());
        }
        if is_wait_over(&acknowledgements) || Instant::now() >= deadline {
            anyhow::bail!("{}", describe_missing_acknowledgements(&acknowledgements));
        }
        std::thread::sleep(ACKNOWLEDGEMENT_POLL_INTERVAL);
    }
}

fn is_in_force_everywhere(acknowledgements: &Acknowledgements) -> bool {
    acknowledgements.pending_count == 0
        && acknowledgements.rejected_count == 0
        && acknowledgements.disconnected_load_balancers.is_empty()
}

/// Returns whether further answers cannot change the outcome, because a daemon rejects this configuration or all
/// connected daemons have answered.
fn is_wait_over(acknowledgements: &Acknowledgements) -> bool {
    let newest_generation = acknowledgements.configuration_generation;
    let rejects_newest_generation =
        |update: &RejectedUpdate| update.update_kind == "configuration" && update.generation == newest_generation;
    acknowledgements.pending_count == 0 || acknowledgements.rejected.iter().any(rejects_newest_generation)
}

/// Returns a description of the daemons that have not applied the newest configuration.
fn describe_missing_acknowledgements(acknowledgements: &Acknowledgements) -> String {
    let mut lines = vec![format!(
        "configuration {} is in force at {}, not at {}; {} updates were rejected, {} load balancers are not connected:",
        acknowledgements.configuration_generation,
        acknowledgements.acknowledged_count,
        acknowledgements.pending_count,
        acknowledgements.rejected_count,
        acknowledgements.disconnected_load_balancers.len()
    )];
    let format_waiting_line = |waiting_daemon: &PeerGeneration| {
        format!(
            "  {} {}: has configuration {}",
            waiting_daemon.component, waiting_daemon.name, waiting_daemon.configuration_generation
        )
    };
    let format_disconnected_line = |PeerGeneration { name, .. }: &PeerGeneration| {
        format!(
            "  lb {name}: is not connected, and forwards by what it has, if it runs: expected its daemon to run, or \
             `coreward lb forget {name}` if it is gone for good"
        )
    };
    lines.extend(acknowledgements.pending_peers.iter().map(format_waiting_line));
    lines.extend(RejectedUpdate::summary_lines(&acknowledgements.rejected).into_iter().map(|line| format!("  {line}")));
    lines.extend(acknowledgements.disconnected_load_balancers.iter().map(format_disconnected_line));
    lines.join("\n")
}

fn ask_for_confirmation() -> anyhow::Result<bool> {
    anyhow::ensure!(std::io::stdin().is_terminal(), "standard input is no terminal: expected --yes or --dry-run");
    write!(std::io::stdout(), "Apply this? [y/N] ")?;
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build_acknowledgements(
        waiting_count: u64,
        rejected_generations: &[u64],
        disconnected_names: &[&str],
    ) -> Acknowledgements {
        let build_load_balancer = |name: &str| PeerGeneration {
            component: "lb".to_owned(),
            name: name.to_owned(),
            configuration_generation: 4,
        };
        let rejected_updates: Vec<RejectedUpdate> = rejected_generations
            .iter()
            .map(|generation| RejectedUpdate {
                component: "lb".to_owned(),
                name: "lb1".to_owned(),
                update_kind: "configuration".to_owned(),
                service: None,
                generation: *generation,
                reason: "too many services".to_owned(),
            })
            .collect();
        Acknowledgements {
            configuration_generation: 5,
            acknowledged_count: 1,
            pending_count: waiting_count,
            pending_peers: (0..waiting_count).map(|_| build_load_balancer("lb1")).collect(),
            rejected_count: rejected_updates.len() as u64,
            rejected: rejected_updates,
            disconnected_load_balancers: disconnected_names.iter().copied().map(build_load_balancer).collect(),
        }
    }

    #[test]
    fn rejection_of_the_newest_configuration_ends_the_wait() {
        assert!(is_wait_over(&build_acknowledgements(1, &[5], &[])));
        assert!(!is_wait_over(&build_acknowledgements(1, &[4], &[])), "the rejection of an older one");
        assert!(!is_wait_over(&build_acknowledgements(1, &[], &[])));
        assert!(is_in_force_everywhere(&build_acknowledgements(0, &[], &[])));
    }

    #[test]
    fn disconnected_load_balancer_is_named_in_the_error() {
        let acknowledgements = build_acknowledgements(0, &[], &["lb2"]);
        assert!(!is_in_force_everywhere(&acknowledgements) && is_wait_over(&acknowledgements));
        assert!(
            describe_missing_acknowledgements(&acknowledgements).contains("  lb lb2: is not connected"),
            "{}",
            describe_missing_acknowledgements(&acknowledgements)
        );
    }
}
