//! The command `coreward capture`, which shows a load balancer's packets and decisions, as text or as a pcapng file.

use std::fmt;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use coreward_dataplane::lb::capture::{
    self, CapturedPacket, CapturedPacketDestination, PacketCapture, PacketCaptureOptions,
};
use coreward_model::ServiceAddress;
use nix::time::{ClockId, clock_gettime};

use crate::config::LoadBalancerConfig;
use crate::pcapng::PcapngWriter;

/// Options of `coreward capture`.
#[derive(Debug, Clone, clap::Args)]
pub struct CaptureArgs {
    /// Configuration file of the load balancer, which names the pin directory (docs/config.md)
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Name of the service, or its VIP and port (UDP: with `/udp`)
    #[arg(long, value_name = "SERVICE")]
    pub service: String,
    /// Write the captured packets, unmodified, to this pcapng file [default: print each decision]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// With --out, add the decision to each packet as a comment
    #[arg(long, requires = "out")]
    pub annotate: bool,
    /// Number of bytes captured of each packet
    #[arg(long, value_name = "BYTES", default_value_t = 65_535,
        value_parser = clap::value_parser!(u32).range(34..=65_535))]
    pub length: u32,
    /// Stop after this many packets
    #[arg(long, value_name = "PACKETS")]
    pub count: Option<u64>,
    /// Stop after this many seconds
    #[arg(long)]
    pub seconds: Option<u64>,
}

/// Interval at which the capture checks whether it must end.
const CAPTURE_END_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Captures packets of a service until the given number of packets or seconds is reached, or until SIGINT. Then prints
/// the number of packets. Fails when no load balancer runs, when it does not have the service, or when the file cannot
/// be written.
pub fn run_capture_command(args: &CaptureArgs) -> anyhow::Result<()> {
    let config = LoadBalancerConfig::load(&args.config)?;
    let service = find_service(&args.service, &capture::pinned_services_with_names(&config.pin_directory)?)?;
    let options =
        PacketCaptureOptions { pin_directory: config.pin_directory, service, max_bytes_per_packet: args.length };
    let mut packet_sink = match &args.out {
        Some(path) => CapturedPacketSink::PcapngFile(PcapngFile::create(path, args.annotate)?),
        None => CapturedPacketSink::TextLines,
    };
    let mut capture = PacketCapture::start(options)?;
    eprintln!("capturing {service}");
    let stop_flag = install_stop_signal_handler()?;
    let monotonic_epoch = monotonic_clock_epoch()?;
    let started_at = Instant::now();
    let (mut packet_count, mut write_error) = (0, None);
    while !stop_flag.load(Ordering::Relaxed)
        && write_error.is_none()
        && args.count.is_none_or(|count| packet_count < count)
        && args.seconds.is_none_or(|seconds| started_at.elapsed() < Duration::from_secs(seconds))
    {
        capture.poll(CAPTURE_END_CHECK_INTERVAL, &mut |packet| {
            if write_error.is_none() && args.count.is_none_or(|count| packet_count < count) {
                packet_count += 1;
                write_error = packet_sink.write_packet(monotonic_epoch + packet.arrival_time, &packet).err();
            }
        })?;
    }
    eprintln!("{packet_count} packets captured, {} records lost", capture.lost_record_count());
    match write_error {
        // A closed pipe (as with `| head`) is an orderly end.
        Some(error) if is_broken_pipe(&error) => Ok(()),
        Some(error) => Err(error),
        None => packet_sink.flush(),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref().is_some_and(|error: &std::io::Error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

pub(crate) fn find_service(
    requested_service: &str,
    services_and_names: &[(ServiceAddress, String)],
) -> anyhow::Result<ServiceAddress> {
    let is_requested_service = |(address, name): &&(ServiceAddress, String)| {
        let address_text = address.to_string();
        name == requested_service
            || address_text == requested_service
            || address_text.strip_suffix("/tcp") == Some(requested_service)
    };
    let Some((address, _)) = services_and_names.iter().find(is_requested_service) else {
        let known_services: Vec<String> =
            services_and_names.iter().map(|(address, name)| format!("{name} ({address})")).collect();
        bail!("service {requested_service:?}: expected one of {}", known_services.join(", "));
    };
    Ok(*address)
}

fn install_stop_signal_handler() -> anyhow::Result<Arc<AtomicBool>> {
    let stop_flag = Arc::new(AtomicBool::new(false));
    let handler_flag = stop_flag.clone();
    ctrlc::set_handler(move || handler_flag.store(true, Ordering::Relaxed)).context("cannot handle SIGINT")?;
    Ok(stop_flag)
}

/// Returns the time since 1970 at which CLOCK_MONOTONIC was zero.
fn monotonic_clock_epoch() -> anyhow::Result<Duration> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).context("the wall clock is before 1970")?;
    Ok(now.saturating_sub(clock_gettime(ClockId::CLOCK_MONOTONIC)?.into()))
}

enum CapturedPacketSink {
    TextLines,
    PcapngFile(PcapngFile),
}

impl CapturedPacketSink {
    fn write_packet(&mut self, unix_time: Duration, packet: &CapturedPacket) -> anyhow::Result<()> {
        match self {
            CapturedPacketSink::TextLines => {
                let decision_comment = PacketDecisionComment(packet);
                let (seconds, micros) = (unix_time.as_secs(), unix_time.subsec_micros());
                Ok(writeln!(
                    std::io::stdout(),
                    "{seconds}.{micros:06} {} bytes: {decision_comment}",
                    packet.frame_length
                )?)
            }
            CapturedPacketSink::PcapngFile(file) => file.write_packet(unix_time, packet),
        }
    }
}

impl CapturedPacketSink {
    /// Flushes the file and returns any error, because dropping the writer would ignore it.
    fn flush(self) -> anyhow::Result<()> {
        match self {
            CapturedPacketSink::TextLines => Ok(()),
            CapturedPacketSink::PcapngFile(mut file) => file.writer.flush().context("writing the capture"),
        }
    }
}

struct PcapngFile {
    writer: PcapngWriter<BufWriter<File>>,
    adds_decision_comments: bool,
}

impl PcapngFile {
    fn create(path: &std::path::Path, adds_decision_comments: bool) -> anyhow::Result<Self> {
        let file = File::create(path).with_context(|| path.display().to_string())?;
        Ok(Self { writer: PcapngWriter::new(BufWriter::new(file))?, adds_decision_comments })
    }

    fn write_packet(&mut self, unix_time: Duration, packet: &CapturedPacket) -> anyhow::Result<()> {
        let decision = self.adds_decision_comments.then(|| PacketDecisionComment(packet).to_string());
        self.writer.write_packet(unix_time, &packet.received_frame, packet.frame_length, decision.as_deref())?;
        Ok(())
    }
}

struct PacketDecisionComment<'a>(&'a CapturedPacket);

impl fmt::Display for PacketDecisionComment<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.0.outcome)?;
        match &self.0.destination {
            CapturedPacketDestination::Kernel => f.write_str("passed to the kernel"),
            CapturedPacketDestination::Dropped => f.write_str("dropped"),
            CapturedPacketDestination::Broadcast => f.write_str("to all servers"),
            CapturedPacketDestination::LoadBalancer { owner_number } => {
                write!(f, "to the load balancer with owner number {owner_number}")
            }
            CapturedPacketDestination::UnknownMac(mac) => write!(f, "to {mac}, which is no server's now"),
            CapturedPacketDestination::Server { mac, ids } => {
                let candidate_ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
                write!(f, "to server {} ({mac})", candidate_ids.join(" or "))
            }
        }
    }
}
