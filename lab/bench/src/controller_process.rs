//! Process of a controller that a bench measures, and the clients that connect to it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use coreward_api::types::Status;
use coreward_http::client::ControllerClient;
use coreward_http::tokens::token_file_path;
use coreward_rpc::v1::control_client::ControlClient;
use coreward_tls::connect::GrpcConnector;
use coreward_tls::{FleetRole, ReloadableTlsCredentials};
use coreward_wire::v1::{dataplane_update, load_balancer_message};
use coreward_wire::{table, v1};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

use crate::certificates::TestCertificateAuthority;

/// Options of the process that runs the measured controller.
#[derive(Debug, Clone, clap::Args)]
pub struct ControllerProcessArgs {
    #[arg(long)]
    config: std::path::PathBuf,
}

/// Runs the controller in this process, as `coreward controller` does. Fails in the same cases as that command.
pub fn run_controller_process(args: &ControllerProcessArgs) -> anyhow::Result<()> {
    coreward_control_server::server::run_controller(&args.config)
}

/// Temporary directory, which is removed when this value is dropped.
pub(crate) struct ScratchDirectory(pub(crate) std::path::PathBuf);

impl ScratchDirectory {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let directory = std::env::temp_dir().join(format!("coreward-bench-{}", std::process::id()));
        std::fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
        Ok(Self(directory))
    }
}

impl Drop for ScratchDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Process of the measured controller, which is killed when this value is dropped.
pub(crate) struct ControllerProcess {
    pub(crate) child: Child,
    pub(crate) grpc_address: SocketAddr,
    api_address: SocketAddr,
    /// Path of the file with an operator's API token.
    token_path: PathBuf,
    pub(crate) metrics_address: SocketAddr,
    /// Certificate authority of all daemons, or `None` if they connect without TLS.
    certificate_authority: Option<TestCertificateAuthority>,
}

impl Drop for ControllerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl ControllerProcess {
    pub(crate) fn start(
        fleet: &str,
        certificate_authority: Option<TestCertificateAuthority>,
        directory: &Path,
    ) -> anyhow::Result<Self> {
        std::fs::write(directory.join("fleet.toml"), fleet)?;
        Self::spawn_with_config_lines("fleet = \"fleet.toml\"\n", certificate_authority, directory)
    }

    pub(crate) fn start_without_fleet(directory: &Path) -> anyhow::Result<Self> {
        Self::spawn_with_config_lines("", None, directory)
    }

    fn spawn_with_config_lines(
        config_lines: &str,
        certificate_authority: Option<TestCertificateAuthority>,
        directory: &Path,
    ) -> anyhow::Result<Self> {
        // Finds a free port, which the controller binds shortly afterwards.
        let find_free_address = || std::net::TcpListener::bind("127.0.0.1:0")?.local_addr();
        let (address, api_address, metrics_address) =
            (find_free_address()?, find_free_address()?, find_free_address()?);
        let store_path = directory.join("controller.redb");
        let config_path = directory.join("controller.toml");
        let tls_table = certificate_authority
            .as_ref()
            .map(|authority| authority.issue_certificate_as_toml(FleetRole::Controller, "controller"))
            .transpose()?;
        std::fs::write(
            &config_path,
            format!(
                "listen = \"{address}\"\napi = \"{api_address}\"\nstore = {store_path:?}\n\
                 metrics = \"{metrics_address}\"\n{config_lines}{}",
                tls_table.unwrap_or_default()
            ),
        )?;
        let mut command = Command::new(std::env::current_exe()?);
        let process = command.args(["bench", "controller-process"]).arg("--config").arg(config_path).spawn()?;
        let operator_token_path = token_file_path(directory, coreward_api::Role::Operator);
        Ok(Self {
            child: process,
            grpc_address: address,
            api_address,
            token_path: operator_token_path,
            metrics_address,
            certificate_authority,
        })
    }

    /// Waits until the controller accepts connections. Fails when it ends, or after 5 s.
    pub(crate) async fn wait_until_listening(&mut self) -> anyhow::Result<()> {
        for _ in 0..100 {
            if TcpStream::connect(self.grpc_address).await.is_ok() {
                return Ok(());
            }
            let exit_status = self.child.try_wait()?;
            ensure!(exit_status.is_none(), "the controller ended: {exit_status:?}");
            sleep(Duration::from_millis(50)).await;
        }
        anyhow::bail!("no connection to the controller at {}", self.grpc_address)
    }

    /// Returns the `[tls]` table for another daemon's configuration file. The text is empty if the controller runs
    /// without TLS.
    pub(crate) fn tls_config_toml(&self, role: FleetRole, name: &str) -> anyhow::Result<String> {
        Ok(self
            .certificate_authority
            .as_ref()
            .map(|authority| authority.issue_certificate_as_toml(role, name))
            .transpose()?
            .unwrap_or_default())
    }

    /// Waits until the controller listens, and connects to it with this role and name.
    pub(crate) async fn connect_as(&mut self, role: FleetRole, name: &str) -> anyhow::Result<ControlClient<Channel>> {
        self.wait_until_listening().await?;
        let credential_files =
            self.certificate_authority.as_ref().map(|authority| authority.issue_certificate(role, name)).transpose()?;
        let tls = credential_files.map(ReloadableTlsCredentials::load_from_files).transpose()?;
        let connector = GrpcConnector::new(self.grpc_address, tls.map(|tls| (tls, &[FleetRole::Controller][..])));
        let endpoint = Endpoint::from_shared(format!("http://{}", self.grpc_address))?;
        Ok(ControlClient::new(endpoint.connect_with_connector(connector).await?))
    }

    /// Waits until the controller listens, and returns an API client with an operator's token.
    pub(crate) async fn connect_operator_client(&mut self) -> anyhow::Result<ControllerClient> {
        self.wait_until_listening().await?;
        ControllerClient::new(self.api_address.into(), &self.token_path)
    }

    pub(crate) async fn fetch_status(&mut self) -> anyhow::Result<Status> {
        self.connect_operator_client().await?.status(false).await
    }

    /// Returns the controller process's user and kernel CPU time (s), from fields 14 and 15 of its stat file (proc(5)).
    pub(crate) fn user_and_system_cpu_seconds(&self) -> anyhow::Result<(f64, f64)> {
        let stat_line = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        let (_, fields) = stat_line.rsplit_once(") ").context("a stat file without a name in brackets")?;
        let parse_ticks_in_field = |field_number: usize| -> anyhow::Result<f64> {
            Ok(fields.split(' ').nth(field_number - 3).context("a short stat file")?.parse::<f64>()?)
        };
        let ticks_per_second =
            nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.context("no clock ticks")? as f64;
        Ok((parse_ticks_in_field(14)? / ticks_per_second, parse_ticks_in_field(15)? / ticks_per_second))
    }

    pub(crate) fn resident_mib(&self) -> anyhow::Result<u64> {
        self.read_status_memory_mib("VmRSS:")
    }

    /// Returns the value (MiB) of the line that starts with `prefix` in the controller's /proc/PID/status (proc(5)).
    pub(crate) fn read_status_memory_mib(&self, prefix: &str) -> anyhow::Result<u64> {
        let proc_status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let status_line =
            proc_status.lines().find_map(|line| line.strip_prefix(prefix)).with_context(|| format!("no {prefix}"))?;
        Ok(status_line.trim().trim_end_matches(" kB").parse::<u64>()? / 1024)
    }
}

pub(crate) async fn subscribe_to_tables(
    controller: &mut ControllerProcess,
    lb_index: u32,
) -> anyhow::Result<Streaming<v1::DataplaneUpdate>> {
    let (sender, receiver) = mpsc::channel(1);
    let registration = v1::LoadBalancerRegistration {
        name: format!("lb{lb_index}"),
        version: "bench".into(),
        address: Vec::new(),
        configuration_generation: 0,
    };
    let message = Some(load_balancer_message::Message::Registration(registration));
    sender.send(v1::LoadBalancerMessage { message }).await?;
    let updates = controller
        .connect_as(FleetRole::Lb, &format!("lb{lb_index}"))
        .await?
        .load_balancer(ReceiverStream::new(receiver))
        .await?
        .into_inner();
    // The stream would end without a sender, so this task keeps one.
    tokio::spawn(async move {
        sender.closed().await;
    });
    Ok(updates)
}

/// Receives placement tables until the controller ends. Returns all arrival times, and the last table's size in bytes.
pub(crate) async fn receive_tables_until_end(mut updates: Streaming<v1::DataplaneUpdate>) -> (Vec<Instant>, usize) {
    let (mut arrival_times, mut table_bytes) = (Vec::new(), 0);
    while let Ok(Some(update)) = updates.message().await {
        if let Some(dataplane_update::Update::Table(bytes)) = update.update {
            table_bytes = bytes.len();
            table::decode_table(bytes).expect("the controller sends tables that can be read");
            arrival_times.push(Instant::now());
        }
    }
    (arrival_times, table_bytes)
}
