//! Environment that measures a controller at its limit, in a network namespace of this process. The controller has its
//! own CPU. Emulated agents, and a load balancer that installs the controller's tables, share another CPU.

use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

use crate::namespace::{self, run_ip_command};
use crate::thread_cpus::{self, CALLING_THREAD_PID};
use anyhow::{Context as _, ensure};
use coreward_tls::FleetRole;

use crate::agent::BpfPinDirectory;
use crate::certificates::TestCertificateAuthority;
use crate::controller;
use crate::controller_process::{ControllerProcess, ScratchDirectory};
use crate::report::BenchReport;

/// Options shared by the benches `scale` and `racks`.
#[derive(Debug, Clone, clap::Args)]
pub struct SharedScaleBenchArgs {
    /// Number of cores of each server
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=2048))]
    pub cores: u16,
    /// Number of services, each with an equal share of the servers
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub services: u32,
    /// Number of measured windows
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub windows: u32,
    /// Length of a window (s)
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..))]
    pub window_seconds: u64,
    /// Use plain connections, without TLS
    #[arg(long)]
    pub plain: bool,
}

/// Starts a controller and a load balancer, and runs `measure` with the controller and the report interval. All run in
/// a new thread's network namespace. Fails without root, when a process does not start, or when `measure` fails.
pub fn measure_in_scale_environment<M>(
    bench_name: &str,
    agents: u32,
    args: &SharedScaleBenchArgs,
    measure: M,
) -> anyhow::Result<BenchReport>
where
    M: AsyncFnOnce(&mut ControllerProcess, Duration) -> anyhow::Result<BenchReport> + Send + 'static,
{
    ensure!(nix::unistd::geteuid().is_root(), "coreward-bench {bench_name} loads BPF programs: run it as root");
    let (cores, services, uses_tls) = (args.cores, args.services, !args.plain);
    let fleet_args =
        controller::ControllerBenchArgs { agents, cores, services, ..controller::ControllerBenchArgs::default() };
    let measuring_thread = std::thread::spawn(move || set_up_controller_and_measure(&fleet_args, uses_tls, measure));
    measuring_thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn set_up_controller_and_measure<M>(
    fleet_args: &controller::ControllerBenchArgs,
    uses_tls: bool,
    measure: M,
) -> anyhow::Result<BenchReport>
where
    M: AsyncFnOnce(&mut ControllerProcess, Duration) -> anyhow::Result<BenchReport>,
{
    coreward_control_server::server::raise_open_file_limit();
    make_veth_network()?;
    let (scratch_directory, pin_directory) = (ScratchDirectory::new()?, BpfPinDirectory::new()?);
    let certificate_authority =
        uses_tls.then(|| TestCertificateAuthority::new(&scratch_directory.0.join("certificates"))).transpose()?;
    // A process inherits the CPU of the thread that starts it.
    thread_cpus::bind_to_cpu(CALLING_THREAD_PID, 0)?;
    let mut controller = ControllerProcess::start(
        &controller::build_fleet_document(fleet_args),
        certificate_authority,
        &scratch_directory.0,
    )?;
    thread_cpus::bind_to_cpu(CALLING_THREAD_PID, 1)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        controller.wait_until_listening().await?;
        let _balancer = LoadBalancerProcess::start(&controller, &scratch_directory, &pin_directory)?;
        set_thread_idle_priority()?;
        measure(&mut controller, Duration::from_millis(fleet_args.report_interval_ms)).await
    })
}

/// Options of the process that runs the measured load balancer.
#[derive(Debug, Clone, clap::Args)]
pub struct LoadBalancerProcessArgs {
    #[arg(long)]
    config: PathBuf,
}

/// Runs the load balancer in this process, as `coreward lb` does. Fails in the same cases as that command.
pub fn run_load_balancer_process(args: &LoadBalancerProcessArgs) -> anyhow::Result<()> {
    coreward_lb::daemon::run_load_balancer(&args.config)
}

/// Process of a load balancer, which is killed when this value is dropped.
pub struct LoadBalancerProcess(Child);

impl LoadBalancerProcess {
    /// Starts a load balancer at the device `eth0`, with its pins below `pin_directory`. Fails when the process does
    /// not start.
    pub fn start(
        controller: &ControllerProcess,
        scratch_directory: &ScratchDirectory,
        pin_directory: &BpfPinDirectory,
    ) -> anyhow::Result<Self> {
        let config_path = scratch_directory.0.join("lb.toml");
        let config_text = format!(
            "name = \"lb1\"\ncontroller = \"{}\"\ninterface = \"eth0\"\npin_directory = {:?}\n\
             state_directory = {:?}\nxdp_mode = \"generic\"\n{}",
            controller.grpc_address,
            pin_directory.0.join("lb1"),
            scratch_directory.0,
            controller.tls_config_toml(FleetRole::Lb, "lb1")?,
        );
        std::fs::write(&config_path, config_text)?;
        let mut command = Command::new(std::env::current_exe()?);
        Ok(Self(command.args(["bench", "load-balancer-process"]).arg("--config").arg(config_path).spawn()?))
    }
}

impl Drop for LoadBalancerProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Creates the veth pair `eth0` and `eth1` in a new namespace. `eth1` answers ARP for 10.2.0.0/16. Fails without root.
pub fn make_veth_network() -> anyhow::Result<()> {
    namespace::enter_new_network_namespace()?;
    for command in [
        "link set lo up",
        "link add eth0 type veth peer name eth1",
        "link set eth0 up",
        "link set eth1 up",
        "route add local 10.2.0.0/16 dev eth1",
    ] {
        run_ip_command(command)?;
    }
    Ok(())
}

/// Gives the calling thread, which emulates the agents, the lowest priority. The load balancer must have precedence,
/// because real agents would run on other machines.
fn set_thread_idle_priority() -> anyhow::Result<()> {
    let scheduling_parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 is the calling thread, and the kernel only reads `scheduling_parameters`.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const scheduling_parameters) };
    nix::errno::Errno::result(result).map(drop).context("SCHED_IDLE")
}
