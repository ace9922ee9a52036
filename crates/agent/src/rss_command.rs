//! The command `coreward agent rss`, which shows the RSS key and table, and the predicted and actual queue of each SYN.

use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use coreward_dataplane::server::ServerPrograms;
use coreward_dataplane::tc::{self, PacketDirection};
use coreward_dataplane::vlan_device;
use coreward_intf as intf;
use coreward_model::rss::{IndirectionTable, RssConfig, RssInputTransform, RssKey};
use coreward_model::tuple::address_from_words;
use serde::Serialize;

use crate::rss::ethtool::EthtoolRssDevice;
use crate::rss::input::InputTransformSearch;
use crate::rss::rss_verifier::{RssTableVerdict, RssTableVerifier};
use crate::rss::{RssDevice as _, RssSettings};

/// Options of `coreward agent rss`.
#[derive(Debug, Clone, clap::Args)]
pub struct RssCommandArgs {
    /// Network device whose RSS settings are shown
    #[arg(long)]
    pub interface: String,
    /// Seconds for which SYNs are watched; 0 only shows key and table
    #[arg(long, default_value_t = 10)]
    pub seconds: u64,
    /// Stop after this many SYNs
    #[arg(long)]
    pub syns: Option<u32>,
    /// Print JSON objects, one per line: the NIC, each SYN, and at the end the verdict
    #[arg(long)]
    pub json: bool,
    /// Set this RSS key first (hexadecimal bytes, as `ethtool -x` prints them); it stays set
    #[arg(long, value_name = "KEY")]
    pub set_key: Option<RssKey>,
    /// Set a balanced indirection table first, generated from this server id as with `manage_rss`; it stays set
    #[arg(long, value_name = "SERVER ID")]
    pub balanced_seed: Option<u16>,
}

/// Interval between two reads of the SYN samples. Usually fewer than `RSS_SAMPLES` SYNs arrive meanwhile.
const SYN_SAMPLE_POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum RssOutputLine<'a> {
    Nic {
        interface: &'a str,
        receive_queues: u16,
        key: String,
        indirection_table: &'a [u16],
    },
    Syn(SampledSyn),
    End {
        matched: u64,
        mismatched: u64,
        without_queue: u64,
        verdict: RssTableVerdict,
        /// Input transform that the SYNs show, if the driver reports a different one.
        input: Option<&'static str>,
    },
}

/// Sampled SYN, with its predicted receive queue and the queue on which it arrived.
#[derive(Serialize)]
struct SampledSyn {
    source: SocketAddr,
    destination: SocketAddr,
    hash: u32,
    predicted_queue: u16,
    actual_queue: u16,
}

impl From<intf::rss_sample> for SampledSyn {
    fn from(sample: intf::rss_sample) -> Self {
        let to_socket_address =
            |address: [u32; 4], port: u16| SocketAddr::new(address_from_words(address), u16::from_be(port));
        Self {
            source: to_socket_address(sample.source_address, sample.source_port),
            destination: to_socket_address(sample.destination_address, sample.destination_port),
            hash: sample.hash,
            predicted_queue: sample.predicted_queue,
            actual_queue: sample.actual_queue,
        }
    }
}

/// Prints the RSS key and table, samples SYNs, and verifies the table with them. Returns false if the NIC does not use
/// the table. Fails if the device does not exist or has no usable RSS, or if the kernel rejects a request.
pub fn run_rss_command(args: &RssCommandArgs) -> anyhow::Result<bool> {
    let interface_index = nix::net::if_::if_nametoindex(args.interface.as_str())
        .with_context(|| format!("interface {}: expected a device of this network namespace", args.interface))?;
    let mut nic_device = EthtoolRssDevice::new(&vlan_device::underlying_device_or_self(&args.interface));
    set_requested_rss(args, &mut nic_device)?;
    let rss_config = nic_device.read_config()?;
    let receive_queue_count = nic_device.receive_queue_count();
    let nic_line = RssOutputLine::Nic {
        interface: &args.interface,
        receive_queues: receive_queue_count,
        key: rss_config.key.to_string(),
        indirection_table: rss_config.indirection_table.queue_by_entry(),
    };
    if args.seconds == 0 {
        print_line(args.json, &nic_line)?;
        return Ok(true);
    }
    let mut bpf_programs = ServerPrograms::load_unattached(true)?;
    bpf_programs.set_rss_config(Some(&rss_config), 1);
    let _tc_attachment = tc::attach_until_drop(
        bpf_programs.program_for_direction(PacketDirection::Ingress).as_fd(),
        interface_index,
        PacketDirection::Ingress,
    )?;
    // From here on, every SYN is sampled.
    print_line(args.json, &nic_line)?;
    verify_table_by_syns(args, &bpf_programs, &rss_config)
}

fn set_requested_rss(args: &RssCommandArgs, nic_device: &mut EthtoolRssDevice) -> anyhow::Result<()> {
    if args.set_key.is_none() && args.balanced_seed.is_none() {
        return Ok(());
    }
    let mut settings =
        RssSettings { key: args.set_key.as_ref().map(|key| key.key_bytes().to_vec()), ..Default::default() };
    if let Some(seed) = args.balanced_seed {
        let table = IndirectionTable::draw_balanced_entries(
            seed.into(),
            nic_device.table_entry_count()?,
            nic_device.receive_queue_count(),
        )?;
        settings.indirection_table = table.queue_by_entry().iter().map(|queue| u32::from(*queue)).collect();
    }
    Ok(nic_device.write_settings(&settings)?)
}

fn verify_table_by_syns(
    args: &RssCommandArgs,
    bpf_programs: &ServerPrograms,
    rss_config: &RssConfig,
) -> anyhow::Result<bool> {
    let deadline = Instant::now() + Duration::from_secs(args.seconds);
    let (mut last_sample_number, mut transform_search, mut observed_transform) =
        (0, InputTransformSearch::default(), None);
    loop {
        let is_deadline_reached = Instant::now() >= deadline;
        let syn_samples = bpf_programs.syn_samples_after_sequence(last_sample_number);
        observed_transform = transform_search.observe_samples(rss_config, &syn_samples).or(observed_transform);
        for sample in syn_samples {
            last_sample_number = sample.sequence;
            print_line(args.json, &RssOutputLine::Syn(sample.into()))?;
        }
        if is_deadline_reached || args.syns.is_some_and(|max_syn_count| last_sample_number >= max_syn_count) {
            break;
        }
        std::thread::sleep(SYN_SAMPLE_POLL_INTERVAL);
    }
    let counters = bpf_programs.counters();
    let read_counter = |counter: intf::server_counter| counters[counter as usize];
    let (matched, mismatched) =
        (read_counter(intf::SERVER_COUNTER_RSS_MATCHED), read_counter(intf::SERVER_COUNTER_RSS_MISMATCHED));
    let verdict = RssTableVerifier::default().observe_counts(&rss_config.indirection_table, matched, mismatched);
    let unrecorded_queue_count = read_counter(intf::SERVER_COUNTER_RSS_UNPREDICTED);
    let input = observed_transform.filter(|_| verdict == RssTableVerdict::NotInForce).map(RssInputTransform::name);
    print_line(
        args.json,
        &RssOutputLine::End { matched, mismatched, without_queue: unrecorded_queue_count, verdict, input },
    )?;
    Ok(verdict != RssTableVerdict::NotInForce)
}

/// Prints a line and flushes the output, so that a test which reads the output receives each SYN immediately.
fn print_line(as_json: bool, line: &RssOutputLine<'_>) -> anyhow::Result<()> {
    use std::io::Write as _;
    let text = if as_json { serde_json::to_string(line)? } else { format_line(line) };
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{text}")?;
    Ok(stdout.flush()?)
}

fn format_line(line: &RssOutputLine<'_>) -> String {
    match line {
        RssOutputLine::Nic { interface, receive_queues, key, indirection_table } => {
            let table_rows: Vec<String> = indirection_table
                .chunks(16)
                .enumerate()
                .map(|(row_index, queues)| {
                    let queue_columns: Vec<String> = queues.iter().map(|queue| format!("{queue:3}")).collect();
                    format!("  {:4}: {}", row_index * 16, queue_columns.join(" "))
                })
                .collect();
            format!(
                "{interface}: {receive_queues} receive queues\nkey: {key}\ntable of {} entries:\n{}",
                indirection_table.len(),
                table_rows.join("\n")
            )
        }
        RssOutputLine::Syn(SampledSyn { source, destination, hash, predicted_queue, actual_queue }) => {
            let mismatch_note = if predicted_queue == actual_queue { "" } else { "  <- another one" };
            format!(
                "{source} -> {destination}: hash {hash:#010x}, predicted queue {predicted_queue}, arrived on \
                 {actual_queue}{mismatch_note}"
            )
        }
        RssOutputLine::End { matched, mismatched, without_queue, verdict, input } => {
            let input_transform_note = input.map_or(String::new(), |input| {
                format!("; they arrive as if the NIC hashed its input {input}, which the agent finds out by itself")
            });
            format!(
                "{matched} SYNs arrived on the predicted queue, {mismatched} on another one, {without_queue} on none \
                 that was recorded: {verdict}{input_transform_note}"
            )
        }
    }
}
