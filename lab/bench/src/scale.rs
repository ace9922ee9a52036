//! Measures a controller at its limit. Emulated agents report to a real controller on one CPU. A real load balancer,
//! attached to a virtual device, installs the tables. All run in a network namespace that ends with this process.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use tokio::time::{Instant, sleep};

use crate::controller_process::ControllerProcess;
use crate::fake_agent;
use crate::report::{BenchReport, ReportTable};
use crate::test_env::{self, SharedScaleBenchArgs};

/// Options of `coreward-lab bench scale`.
#[derive(Debug, Clone, clap::Args)]
pub struct ScaleBenchArgs {
    /// Number of agents, each with its own connection
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    agents: u32,
    #[command(flatten)]
    scale: SharedScaleBenchArgs,
}

/// Pause after a query of the controller's status, because the query delays other requests.
const PAUSE_AFTER_STATUS_QUERY: Duration = Duration::from_millis(200);

/// Runs the bench of a controller at its limit. Fails without root, or when a process does not start.
pub fn run_scale_bench(args: &ScaleBenchArgs) -> anyhow::Result<BenchReport> {
    let args = args.clone();
    let (agents, scale) = (args.agents, args.scale.clone());
    test_env::measure_in_scale_environment("scale", agents, &scale, async move |controller, interval| {
        measure_controller_limit(&args, controller, interval).await
    })
}

async fn measure_controller_limit(
    args: &ScaleBenchArgs,
    controller: &mut ControllerProcess,
    interval: Duration,
) -> anyhow::Result<BenchReport> {
    let sent_report_count = fake_agent::start_fake_agents(controller, args.agents, args.scale.cores, interval).await?;
    // The first reports are not measured, because they also carry RSS keys and tables.
    sleep(Duration::from_secs(3)).await;
    let windows = measure_scale_windows(&args.scale, controller, &sent_report_count).await?;
    Ok(build_scale_report(args, &windows))
}

/// Measured values of the controller in one window.
pub struct ScaleMeasurementWindow {
    controller_cpu_pct: f64,
    sent_messages_per_second: f64,
    accepted_messages_per_second: f64,
    tables_per_second: f64,
    resident_mib: f64,
    max_resident_mib: f64,
    /// Cumulative distribution of the time from a report's receipt until its placement table is computed. Each
    /// pair has an upper bound (s) and the fraction of the reports up to it.
    report_to_table_seconds_cdf: Vec<(f64, f64)>,
    /// Cumulative distribution of the time from a report's receipt until its placement table is in the kernel. Each
    /// pair has an upper bound (s) and the fraction of the reports up to it.
    report_to_kernel_seconds_cdf: Vec<(f64, f64)>,
    /// Cumulative distribution of the time from a report's sending until its placement table is in the kernel. Each
    /// pair has an upper bound (s) and the fraction of the reports up to it.
    sending_to_kernel_seconds_cdf: Vec<(f64, f64)>,
}

/// Measures all windows. `sent_message_count` counts the messages sent to the controller. Fails when the controller
/// does not answer.
pub async fn measure_scale_windows(
    args: &SharedScaleBenchArgs,
    controller: &mut ControllerProcess,
    sent_message_count: &AtomicU64,
) -> anyhow::Result<Vec<ScaleMeasurementWindow>> {
    let mut windows = Vec::new();
    for _ in 0..args.windows {
        windows.push(
            measure_scale_window(Duration::from_secs(args.window_seconds), controller, sent_message_count).await?,
        );
    }
    Ok(windows)
}

async fn measure_scale_window(
    length: Duration,
    controller: &mut ControllerProcess,
    sent_message_count: &AtomicU64,
) -> anyhow::Result<ScaleMeasurementWindow> {
    let api_client = controller.connect_operator_client().await?;
    let counts_and_time = async || {
        let status = api_client.status(false).await?;
        let table_count: u64 = status.services.iter().map(|service| service.table_generation).sum();
        anyhow::Ok((status.accepted_reports as f64, table_count as f64, Instant::now()))
    };
    let first_counts = counts_and_time().await?;
    // Answers about thousands of servers take a while and delay other requests, which must not be measured.
    sleep(PAUSE_AFTER_STATUS_QUERY).await;
    let metrics_before = fetch_metrics_page(controller.metrics_address)?;
    sleep(PAUSE_AFTER_STATUS_QUERY).await;
    let (start, sent_before, cpu_before) =
        (Instant::now(), sent_message_count.load(Ordering::Relaxed), controller.user_and_system_cpu_seconds()?);
    sleep(length).await;
    let (cpu_after, elapsed_seconds) = (controller.user_and_system_cpu_seconds()?, start.elapsed().as_secs_f64());
    let sent_messages_per_second = (sent_message_count.load(Ordering::Relaxed) - sent_before) as f64 / elapsed_seconds;
    let metrics_after = fetch_metrics_page(controller.metrics_address)?;
    let last_counts = counts_and_time().await?;
    let query_interval_s = (last_counts.2 - first_counts.2).as_secs_f64();
    Ok(ScaleMeasurementWindow {
        controller_cpu_pct: (cpu_after.0 + cpu_after.1 - cpu_before.0 - cpu_before.1) / elapsed_seconds * 100.0,
        sent_messages_per_second,
        accepted_messages_per_second: (last_counts.0 - first_counts.0) / query_interval_s,
        tables_per_second: (last_counts.1 - first_counts.1) / query_interval_s,
        resident_mib: controller.read_status_memory_mib("VmRSS:")? as f64,
        max_resident_mib: controller.read_status_memory_mib("VmHWM:")? as f64,
        report_to_table_seconds_cdf: compute_cumulative_distribution(
            &metrics_before,
            &metrics_after,
            "coreward_table_build_delay_seconds",
        ),
        report_to_kernel_seconds_cdf: compute_cumulative_distribution(
            &metrics_before,
            &metrics_after,
            "coreward_table_propagation_seconds",
        ),
        sending_to_kernel_seconds_cdf: compute_cumulative_distribution(
            &metrics_before,
            &metrics_after,
            "coreward_report_sent_to_kernel_seconds",
        ),
    })
}

fn fetch_metrics_page(address: SocketAddr) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect(address).context("the controller's metrics")?;
    write!(stream, "GET /metrics HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n")?;
    let mut metrics_page = String::new();
    stream.read_to_string(&mut metrics_page)?;
    Ok(metrics_page)
}

/// Returns the buckets of the histogram `name` on a metrics page, as pairs of upper bound and cumulative count.
fn parse_cumulative_buckets(metrics_page: &str, name: &str) -> Vec<(f64, f64)> {
    let prefix = format!("{name}_bucket{{");
    let parse_bucket = |line: &str| {
        let (labels, count) = line.strip_prefix(&prefix)?.split_once("} ")?;
        let upper_bound = labels.split("le=\"").nth(1)?.split('"').next()?;
        Some((upper_bound.parse().unwrap_or(f64::INFINITY), count.parse().ok()?))
    };
    metrics_page.lines().filter_map(parse_bucket).collect()
}

/// Returns the cumulative distribution of the values that were observed between two metrics pages, as pairs of upper
/// bound and fraction of the values.
fn compute_cumulative_distribution(metrics_before: &str, metrics_after: &str, name: &str) -> Vec<(f64, f64)> {
    let (buckets_before, buckets_after) =
        (parse_cumulative_buckets(metrics_before, name), parse_cumulative_buckets(metrics_after, name));
    let new_buckets: Vec<(f64, f64)> =
        buckets_after.iter().zip(&buckets_before).map(|(new, old)| (new.0, new.1 - old.1)).collect();
    let new_value_count = new_buckets.last().map_or(0.0, |(_, count)| *count);
    new_buckets.into_iter().map(|(upper_bound, count)| (upper_bound, count / new_value_count)).collect()
}

/// Returns the quantile `quantile` (0 to 1) of a cumulative distribution in ms, interpolated within its bucket. The
/// upper bounds of the buckets are in seconds.
fn quantile_ms(cdf: &[(f64, f64)], quantile: f64) -> f64 {
    let mut lower_bound_and_share = (0.0, 0.0);
    for (upper_bound, share) in cdf {
        if *share >= quantile {
            let fraction_of_bucket = (quantile - lower_bound_and_share.1) / (share - lower_bound_and_share.1);
            let finite_upper_bound = if upper_bound.is_finite() { *upper_bound } else { lower_bound_and_share.0 };
            return (lower_bound_and_share.0 + (finite_upper_bound - lower_bound_and_share.0) * fraction_of_bucket)
                * 1e3;
        }
        lower_bound_and_share = (*upper_bound, *share);
    }
    f64::NAN
}

/// Returns the percentage of the distribution's values up to `limit_seconds`. The limit is rounded up to the next
/// bucket's upper bound.
fn percent_within_limit(cdf: &[(f64, f64)], limit_seconds: f64) -> f64 {
    cdf.iter().find(|(upper_bound, _)| *upper_bound >= limit_seconds).map_or(f64::NAN, |(_, share)| share * 100.0)
}

/// Adds rows with the results of all windows. `message_name` names the messages whose sending rate is in the first row.
pub fn add_window_rows(table: &mut ReportTable, message_name: &str, windows: &[ScaleMeasurementWindow]) {
    let mut add_result_row = |row_name: &str, to_value: &dyn Fn(&ScaleMeasurementWindow) -> f64| {
        table.add_summary_row(row_name, windows.iter().map(to_value), [])
    };
    add_result_row(&format!("{message_name} sent per second"), &|window| window.sent_messages_per_second);
    add_result_row("reports taken per second", &|window| window.accepted_messages_per_second);
    add_result_row("CPU of the controller, % of one", &|window| window.controller_cpu_pct);
    add_result_row("tables made per second", &|window| window.tables_per_second);
    add_result_row("resident memory, MiB", &|window| window.resident_mib);
    add_result_row("  at most so far", &|window| window.max_resident_mib);
    add_result_row("report to table, p50, ms", &|window| quantile_ms(&window.report_to_table_seconds_cdf, 0.5));
    add_result_row("  p99", &|window| quantile_ms(&window.report_to_table_seconds_cdf, 0.99));
    add_result_row("report received to table in the kernel, p50, ms", &|window| {
        quantile_ms(&window.report_to_kernel_seconds_cdf, 0.5)
    });
    add_result_row("  p99", &|window| quantile_ms(&window.report_to_kernel_seconds_cdf, 0.99));
    add_result_row("  within 10 ms, %", &|window| percent_within_limit(&window.report_to_kernel_seconds_cdf, 0.01));
    add_result_row("report sent to table in the kernel, p50, ms", &|window| {
        quantile_ms(&window.sending_to_kernel_seconds_cdf, 0.5)
    });
    add_result_row("  p99", &|window| quantile_ms(&window.sending_to_kernel_seconds_cdf, 0.99));
    add_result_row("  within 10 ms, %", &|window| percent_within_limit(&window.sending_to_kernel_seconds_cdf, 0.01));
}

fn build_scale_report(args: &ScaleBenchArgs, windows: &[ScaleMeasurementWindow]) -> BenchReport {
    let mut table = ReportTable::new(&["", "median", "least", "most"]);
    add_window_rows(&mut table, "reports", windows);
    BenchReport {
        name: "scale",
        heading: "A controller at its limit",
        method_description: format!(
            "{} agents of {} cores report every 100 ms, each by a gRPC stream over a TCP connection of its own \
             (loopback{}), to a controller that has CPU 0; agents and a load balancer, which puts the tables of {} \
             services in force and reports it for each, share CPU 1, of which the agents have what the other leaves \
             (SCHED_IDLE). {} windows of {} s; percentiles are interpolated in classes. To reach: 2,000 servers on one \
             CPU, 99 % of tables in the kernel within 10 ms of the report that made them due.",
            args.agents,
            args.scale.cores,
            if args.scale.plain { "" } else { ", TLS" },
            args.scale.services,
            args.scale.windows,
            args.scale.window_seconds,
        ),
        tables: vec![table],
    }
}
