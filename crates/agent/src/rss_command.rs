//! `coreward agent rss`: shows the RSS key and table, and the predicted and real queue of each SYN.

use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use coreward_dataplane::server::ServerPrograms;
use coreward_dataplane::tc::{self, Direction};
use coreward_dataplane::vlan_device;
use coreward_intf as intf;
use coreward_model::rss::{IndirectionTable, InputTransform, RssConfig, RssKey};
use coreward_model::tuple::address_from_words;
use serde::Serialize;

use crate::rss::ethtool::EthtoolRss;
use crate::rss::input::TransformSearch;
use crate::rss::rss_verifier::{RssVerifier, Verdict};
use crate::rss::{RssDevice as _, RssSettings};

/// Options of `coreward agent rss`.
#[derive(Debug, Clone, clap::Args)]
pub struct RssArgs {
    /// Network device whose RSS settings are shown
    #[arg(long)]
    pub interface: String,
    /// Seconds for which SYNs are watched; 0: only show key and table
    #[arg(long, default_value_t = 10)]
    pub seconds: u64,
    /// Stop after this many SYNs
    #[arg(long)]
    pub syns: Option<u32>,
    /// Print JSON objects, one per line: the NIC, each SYN, and at the end the verdict
    #[arg(long)]
    pub json: bool,
    /// Set this RSS key first (hexadecimal bytes, as `ethtool -x` prints them); it stays in force
    #[arg(long, value_name = "KEY")]
    pub set_key: Option<RssKey>,
    /// Set a balanced indirection table first, generated from this server id as with `manage_rss`; it stays in force
    #[arg(long, value_name = "SERVER ID")]
    pub balanced_seed: Option<u16>,
}

/// Interval between polls of the samples: fewer SYNs than `RSS_SAMPLES` should arrive in one interval.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum OutputLine<'a> {
    Nic {
        interface: &'a str,
        receive_queues: u16,
        key: String,
        indirection_table: &'a [u16],
    },
    Syn(Syn),
    End {
        matched: u64,
        mismatched: u64,
        without_queue: u64,
        verdict: Verdict,
        /// Input transform that the SYNs show, if the driver reports another one.
        input: Option<&'static str>,
    },
}

/// Sampled SYN, with the predicted receive queue and the one on which it arrived.
#[derive(Serialize)]
struct Syn {
    source: SocketAddr,
    destination: SocketAddr,
    hash: u32,
    predicted_queue: u16,
    actual_queue: u16,
}

impl From<intf::rss_sample> for Syn {
    fn from(sample: intf::rss_sample) -> Self {
        let socket = |address: [u32; 4], port: u16| SocketAddr::new(address_from_words(address), u16::from_be(port));
        Self {
            source: socket(sample.source_address, sample.source_port),
            destination: socket(sample.destination_address, sample.destination_port),
            hash: sample.hash,
            predicted_queue: sample.predicted_queue,
            actual_queue: sample.actual_queue,
        }
    }
}

/// Prints RSS key and table, samples SYNs, and verifies the table. Returns false if the table is not in force. Fails
/// when the device does not exist or has no usable RSS, or the kernel rejects something.
pub fn run(args: &RssArgs) -> anyhow::Result<bool> {
    let interface_index = nix::net::if_::if_nametoindex(args.interface.as_str())
        .with_context(|| format!("interface {}: expected a device of this network namespace", args.interface))?;
    let mut device = EthtoolRss::new(&vlan_device::nic(&args.interface));
    set(args, &mut device)?;
    let rss = device.read()?;
    let queues = device.receive_queues();
    let nic = OutputLine::Nic {
        interface: &args.interface,
        receive_queues: queues,
        key: rss.key.to_string(),
        indirection_table: rss.indirection_table.queues(),
    };
    if args.seconds == 0 {
        print(args.json, &nic)?;
        return Ok(true);
    }
    let mut programs = ServerPrograms::load_only(true)?;
    programs.set_rss(Some(&rss), 1);
    let _held =
        tc::attach_until_drop(programs.program(Direction::Ingress).as_fd(), interface_index, Direction::Ingress)?;
    // The command sees every SYN after this line.
    print(args.json, &nic)?;
    watch_syns(args, &programs, &rss)
}

fn set(args: &RssArgs, device: &mut EthtoolRss) -> anyhow::Result<()> {
    if args.set_key.is_none() && args.balanced_seed.is_none() {
        return Ok(());
    }
    let mut settings = RssSettings { key: args.set_key.as_ref().map(|key| key.bytes().to_vec()), ..Default::default() };
    if let Some(seed) = args.balanced_seed {
        let table = IndirectionTable::balanced(seed.into(), device.table_entries()?, device.receive_queues())?;
        settings.indirection_table = table.queues().iter().map(|queue| u32::from(*queue)).collect();
    }
    Ok(device.write(&settings)?)
}

fn watch_syns(args: &RssArgs, programs: &ServerPrograms, rss: &RssConfig) -> anyhow::Result<bool> {
    let end = Instant::now() + Duration::from_secs(args.seconds);
    let (mut last, mut search, mut input) = (0, TransformSearch::default(), None);
    loop {
        let over = Instant::now() >= end;
        let samples = programs.samples(last);
        input = search.observe(rss, &samples).or(input);
        for sample in samples {
            last = sample.sequence;
            print(args.json, &OutputLine::Syn(sample.into()))?;
        }
        if over || args.syns.is_some_and(|syns| last >= syns) {
            break;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    let counters = programs.counters();
    let count = |counter: intf::server_counter| counters[counter as usize];
    let (matched, mismatched) = (count(intf::SERVER_COUNTER_RSS_MATCHED), count(intf::SERVER_COUNTER_RSS_MISMATCHED));
    let verdict = RssVerifier::default().observe(&rss.indirection_table, matched, mismatched);
    let without_queue = count(intf::SERVER_COUNTER_RSS_UNPREDICTED);
    let input = input.filter(|_| verdict == Verdict::NotInForce).map(InputTransform::name);
    print(args.json, &OutputLine::End { matched, mismatched, without_queue, verdict, input })?;
    Ok(verdict != Verdict::NotInForce)
}

/// Prints a line and flushes it, so that a test that reads the output sees each SYN at once.
fn print(json: bool, line: &OutputLine<'_>) -> anyhow::Result<()> {
    use std::io::Write as _;
    let text = if json { serde_json::to_string(line)? } else { text(line) };
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}")?;
    Ok(out.flush()?)
}

fn text(line: &OutputLine<'_>) -> String {
    match line {
        OutputLine::Nic { interface, receive_queues, key, indirection_table } => {
            let rows: Vec<String> = indirection_table
                .chunks(16)
                .enumerate()
                .map(|(row, queues)| {
                    let queues: Vec<String> = queues.iter().map(|queue| format!("{queue:3}")).collect();
                    format!("  {:4}: {}", row * 16, queues.join(" "))
                })
                .collect();
            format!(
                "{interface}: {receive_queues} receive queues\nkey: {key}\ntable of {} entries:\n{}",
                indirection_table.len(),
                rows.join("\n")
            )
        }
        OutputLine::Syn(Syn { source, destination, hash, predicted_queue, actual_queue }) => {
            let fits = if predicted_queue == actual_queue { "" } else { "  <- another one" };
            format!(
                "{source} -> {destination}: hash {hash:#010x}, predicted queue {predicted_queue}, arrived on \
                 {actual_queue}{fits}"
            )
        }
        OutputLine::End { matched, mismatched, without_queue, verdict, input } => {
            let input = input.map_or(String::new(), |input| {
                format!("; they arrive as if the NIC hashed its input {input}, which the agent finds out by itself")
            });
            format!(
                "{matched} SYNs arrived on the predicted queue, {mismatched} on another one, {without_queue} on none \
                 that was \
                 recorded: {verdict}{input}"
            )
        }
    }
}
