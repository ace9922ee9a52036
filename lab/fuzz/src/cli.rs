//! Command `coreward-lab fuzz`, which compares the load balancer's BPF program with its reference model.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use coreward_intf as intf;
use coreward_model::forwarding::ForwardingMode;

use crate::campaign::{FuzzCampaign, FuzzCampaignLimit, FuzzCampaignSummary, FuzzEpochFailure};
use crate::consistency;
use crate::frame::format_hex;
use crate::fuzz_epoch::FuzzEpochStep;
use crate::shrink::shrink_failing_epoch;

/// Arguments of `coreward-lab fuzz`.
#[derive(clap::Args)]
pub struct FuzzArgs {
    #[command(subcommand)]
    command: FuzzCommand,
}

#[derive(clap::Subcommand)]
enum FuzzCommand {
    /// Send generated packets while the state changes, and compare every verdict, byte, counter and map entry
    Packets(PacketFuzzArgs),
    /// Check that connections stay with their server while servers, load balancers and keys change
    Consistency(ConsistencyFuzzArgs),
}

#[derive(clap::Args)]
struct PacketFuzzArgs {
    /// Number of packets [default: as many as fit into --seconds]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    packets: Option<u64>,
    /// Duration, unless --packets is given (s)
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Seed of all packets and changes [default: from the clock; printed]
    #[arg(long)]
    seed: Option<u64>,
    /// Number of the first epoch; to repeat a reported difference, give its epoch and its seed
    #[arg(long, default_value_t = 0)]
    epoch: u64,
    /// Number of threads, each with its own load balancer [default: number of CPUs]
    #[arg(long)]
    threads: Option<usize>,
}

#[derive(clap::Args)]
struct ConsistencyFuzzArgs {
    /// Number of connections
    #[arg(long, default_value_t = consistency::ConsistencyCheckConfig::default().connection_count)]
    connections: u32,
    /// Virtual time in which the connections are opened (minutes)
    #[arg(long, default_value_t = consistency::ConsistencyCheckConfig::default().arrival_minutes)]
    minutes: u32,
    /// Changes per minute of virtual time
    #[arg(long, default_value_t = consistency::ConsistencyCheckConfig::default().changes_per_minute)]
    changes: u32,
    /// Number of load balancers
    #[arg(long, default_value_t = consistency::ConsistencyCheckConfig::default().load_balancer_count)]
    load_balancers: usize,
    /// Consistency mode: stateless or stateful
    #[arg(long, default_value = "stateless")]
    mode: String,
    /// Address family of the VIP
    #[arg(long, default_value = "4", value_parser = ["4", "6"])]
    family: String,
    /// Forwarding to the servers: l2, ipip or gue
    #[arg(long, default_value = "l2")]
    forwarding: ForwardingMode,
    /// Seed of all connections and changes
    #[arg(long, default_value_t = consistency::ConsistencyCheckConfig::default().seed)]
    seed: u64,
    /// Run the reference model only; needs no root
    #[arg(long)]
    model_only: bool,
}

fn run_consistency_check(arguments: &ConsistencyFuzzArgs) -> anyhow::Result<()> {
    let config = consistency::ConsistencyCheckConfig {
        connection_count: arguments.connections,
        arrival_minutes: arguments.minutes,
        changes_per_minute: arguments.changes,
        key_rotation_interval_ms: consistency::ConsistencyCheckConfig::default().key_rotation_interval_ms,
        load_balancer_count: arguments.load_balancers,
        consistency: arguments.mode.parse()?,
        forwarding: arguments.forwarding,
        has_ipv6_vip: arguments.family == "6",
        seed: arguments.seed,
        runs_bpf_program: !arguments.model_only,
    };
    let start = std::time::Instant::now();
    let report = consistency::simulate_and_check_consistency(config)?;
    println!("{report}");
    println!("{:.1} s", start.elapsed().as_secs_f64());
    anyhow::ensure!(report.are_guarantees_kept(), "packets of one connection reached two servers");
    Ok(())
}

/// Runs a fuzz campaign or the consistency check. Fails at the first difference, or when a BPF program cannot be
/// loaded.
pub fn run_fuzz_command(arguments: FuzzArgs) -> anyhow::Result<()> {
    match arguments.command {
        FuzzCommand::Packets(arguments) => run_packet_campaign(&arguments),
        FuzzCommand::Consistency(arguments) => run_consistency_check(&arguments),
    }
}

fn run_packet_campaign(arguments: &PacketFuzzArgs) -> anyhow::Result<()> {
    let read_unix_seconds = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let campaign = FuzzCampaign {
        seed: arguments.seed.unwrap_or_else(read_unix_seconds),
        first_epoch_number: arguments.epoch,
        limit: arguments.packets.map_or(
            FuzzCampaignLimit::MaxDuration(Duration::from_secs(arguments.seconds)),
            FuzzCampaignLimit::MaxPacketCount,
        ),
        thread_count: match arguments.threads {
            Some(threads) => threads,
            None => std::thread::available_parallelism()?.get(),
        },
    };
    println!("seed {}, {} threads", campaign.seed, campaign.thread_count);
    let start = std::time::Instant::now();
    let summary = campaign.run_campaign(|packets| {
        // Prints the progress only now and then, so that long runs print at most some dozen lines.
        if packets.is_multiple_of(4_000_000) {
            println!("{packets} packets after {:.0} s", start.elapsed().as_secs_f64());
        }
    })?;
    print_campaign_summary(&summary);
    match &summary.failure {
        Some(failure) => Err(print_failure_and_build_error(&campaign, failure)),
        None => Ok(()),
    }
}

fn print_campaign_summary(summary: &FuzzCampaignSummary) {
    let seconds = summary.elapsed.as_secs_f64();
    println!(
        "{} packets in {} epochs compared in {seconds:.1} s: {:.0} a second",
        summary.packet_count,
        summary.epoch_count,
        summary.packet_count as f64 / seconds
    );
    for (name, count) in intf::LB_COUNTER_NAMES.iter().zip(&summary.packets_by_outcome) {
        println!("  {name:28}{count:12}");
    }
}

/// Prints the difference and a short sequence of steps that reproduces it. Returns the error with which the command
/// ends.
fn print_failure_and_build_error(campaign: &FuzzCampaign, failure: &FuzzEpochFailure) -> anyhow::Error {
    println!(
        "DIFFERENCE in packet {} of epoch {}: {}",
        failure.packets_until_failure, failure.epoch_number, failure.difference
    );
    println!("again: coreward-lab fuzz packets --seed {} --epoch {} --threads 1", campaign.seed, failure.epoch_number);
    println!("shrinking ...");
    match shrink_failing_epoch(campaign.epoch_seed(failure.epoch_number), failure.packets_until_failure) {
        Ok(Some(sequence)) => {
            println!("the least that shows it: {} steps", sequence.steps.len());
            sequence.steps.iter().for_each(print_epoch_step);
            println!("then the two differ in {}", sequence.difference);
        }
        Ok(None) => println!("the same packets on a new load balancer show no difference"),
        Err(error) => println!("shrinking: {error:#}"),
    }
    anyhow::anyhow!("BPF program and reference model differ")
}

fn print_epoch_step(step: &FuzzEpochStep) {
    match step {
        FuzzEpochStep::Packet(frame) => println!("  packet, {} bytes:\n    {}", frame.len(), format_hex(frame)),
        FuzzEpochStep::Change(change) => {
            // Tables have long texts, which are cut.
            let change_text = format!("{change:?}");
            println!("  {}", change_text.chars().take(400).collect::<String>());
        }
    }
}
