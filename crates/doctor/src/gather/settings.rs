//! Settings from the command line and the daemon's configuration file.

use std::fs::File;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use coreward_agent::config as agent;
use coreward_agent::rss::RssDevice;
use coreward_agent::rss::ethtool::EthtoolRssDevice;
use coreward_agent::rss::testbed::TestbedRssDevice;
use coreward_control_server::config::{ControllerConfig, StoreLocation};
use coreward_dataplane::lb::XdpMode;
use coreward_lb::config::LoadBalancerConfig as LbConfig;
use coreward_model::ServiceAddress;
use coreward_model::forwarding::ForwardingMode;
use coreward_tls::TlsCredentialFiles;
use nix::sys::statvfs;

use super::{controller, find_bind_problem, parent_directory};
use crate::facts::{ControllerFacts, ControllerStoreFacts, DaemonSettings, MachineRole, ServiceFacts};

/// Minimum free disk space for a store, in bytes. A new store file of redb takes half of it.
const MIN_FREE_STORE_BYTES: u64 = 1 << 20;

#[derive(Debug, Clone, Default)]
pub struct DoctorOptions {
    pub config_file: Option<PathBuf>,
    /// Network device. It overrides the device in the configuration file.
    pub interface_override: Option<String>,
    /// Role of the machine. It is required if there is no configuration file.
    pub role: Option<MachineRole>,
    /// Address of the controller. It overrides the addresses in the configuration file.
    pub controller_override: Option<SocketAddr>,
    /// Services to check in addition to those that the controller lists.
    pub additional_services: Vec<ServiceAddress>,
}

pub(super) struct GatheredSettings {
    pub role: MachineRole,
    pub settings: DaemonSettings,
    /// Name of this machine in the controller's fleet.
    pub machine_name: Option<String>,
    pub tls_files: Option<TlsCredentialFiles>,
    pub rss_device: Option<Box<dyn RssDevice>>,
    pub services: Vec<ServiceFacts>,
    pub controller_facts: Option<ControllerFacts>,
}

impl DoctorOptions {
    pub(super) fn gather_settings(&self) -> anyhow::Result<GatheredSettings> {
        let role = match (&self.config_file, self.role) {
            (_, Some(role)) => role,
            (Some(file), None) => detect_role(file)?,
            (None, None) => {
                anyhow::bail!("neither a file nor a role: expected --config FILE, or --role lb, server or controller")
            }
        };
        let mut gathered_settings = match &self.config_file {
            Some(file) => gather_file_settings(role, file)?,
            None => gather_default_settings(role),
        };
        if let Some(interface) = &self.interface_override {
            gathered_settings.settings.interface = Some(interface.clone());
            gathered_settings.rss_device = None;
        }
        if let Some(controller) = self.controller_override {
            gathered_settings.settings.controllers = vec![controller];
        }
        let to_service_facts = |address: &ServiceAddress| ServiceFacts {
            name: "service".to_owned(),
            address: *address,
            is_stamped_by_lb: false,
            is_stamped: true,
            forwarding: ForwardingMode::default(),
            sockets: None,
        };
        gathered_settings.services = self.additional_services.iter().map(to_service_facts).collect();
        Ok(gathered_settings)
    }
}

/// Returns the role of the daemon that uses this file. Detects it by a key that the files of other roles do not have.
fn detect_role(file: &Path) -> anyhow::Result<MachineRole> {
    let text = std::fs::read_to_string(file).with_context(|| format!("{}", file.display()))?;
    let table: toml::Table = text.parse().with_context(|| format!("{}", file.display()))?;
    let role = if table.contains_key("store") || table.contains_key("etcd") {
        MachineRole::Controller
    } else if table.get("server").is_some_and(toml::Value::is_str) {
        MachineRole::Server
    } else {
        ensure!(
            table.contains_key("interface"),
            "{}: neither `store` or [etcd] (a controller's), `server` (an agent's) nor `interface` (a load \
             balancer's): expected the file of a daemon, or --role",
            file.display()
        );
        MachineRole::Lb
    };
    Ok(role)
}

fn gather_default_settings(role: MachineRole) -> GatheredSettings {
    let default_settings = DaemonSettings {
        interface: None,
        pin_directory: None,
        controllers: Vec::new(),
        manages_tcp_timestamps: true,
        reports_cpu_time_as_load: true,
        steering_mode: agent::ConnectionSteeringMode::default(),
        xdp_mode: XdpMode::default(),
        announcement_table_number: None,
    };
    GatheredSettings {
        role,
        settings: default_settings,
        machine_name: None,
        tls_files: None,
        rss_device: None,
        services: Vec::new(),
        controller_facts: None,
    }
}

fn gather_file_settings(role: MachineRole, file: &Path) -> anyhow::Result<GatheredSettings> {
    match role {
        MachineRole::Lb => read_lb_file(file),
        MachineRole::Server => read_agent_file(file),
        MachineRole::Controller => read_controller_file(file),
    }
}

fn read_lb_file(file: &Path) -> anyhow::Result<GatheredSettings> {
    let gathered_settings = gather_default_settings(MachineRole::Lb);
    let config = LbConfig::load(file)?;
    let settings = DaemonSettings {
        interface: Some(config.interface),
        pin_directory: Some(config.pin_directory),
        controllers: config.controllers.addresses().to_vec(),
        xdp_mode: config.xdp_mode,
        announcement_table_number: config.announce.map(|announce| announce.table),
        ..gathered_settings.settings
    };
    Ok(GatheredSettings { settings, machine_name: Some(config.name), tls_files: config.tls, ..gathered_settings })
}

fn read_agent_file(file: &Path) -> anyhow::Result<GatheredSettings> {
    let gathered_settings = gather_default_settings(MachineRole::Server);
    let config = agent::AgentConfig::load(file)?;
    let rss_device: Box<dyn RssDevice> = match &config.rss {
        agent::RssSourceConfig::Ethtool {} => Box::new(EthtoolRssDevice::new(&config.interface)),
        agent::RssSourceConfig::Testbed { path, entries } => {
            Box::new(TestbedRssDevice::new(path.clone(), &config.interface, *entries))
        }
    };
    let settings = DaemonSettings {
        interface: Some(config.interface),
        pin_directory: Some(config.pin_directory),
        controllers: config.controllers.addresses().to_vec(),
        manages_tcp_timestamps: config.manage_timestamps,
        reports_cpu_time_as_load: matches!(config.load, agent::CoreLoadSourceConfig::Cpu {}),
        steering_mode: config.steer,
        ..gathered_settings.settings
    };
    Ok(GatheredSettings {
        settings,
        machine_name: Some(config.server),
        tls_files: config.tls,
        rss_device: Some(rss_device),
        ..gathered_settings
    })
}

fn read_controller_file(file: &Path) -> anyhow::Result<GatheredSettings> {
    let config = ControllerConfig::load(file)?;
    let controller_facts = gather_controller_facts(&config, gather_store_facts(&config.store));
    Ok(GatheredSettings {
        controller_facts: Some(controller_facts),
        tls_files: config.credential_files,
        ..gather_default_settings(MachineRole::Controller)
    })
}

fn gather_controller_facts(config: &ControllerConfig, store: ControllerStoreFacts) -> ControllerFacts {
    let listen_problem = find_bind_problem(config.listen_address);
    ControllerFacts {
        listen_address: config.listen_address,
        is_running: listen_problem.is_some() && controller::is_controller_running(config),
        bind_problem: listen_problem,
        store,
    }
}

fn gather_store_facts(store_location: &StoreLocation) -> ControllerStoreFacts {
    match store_location {
        StoreLocation::Embedded(file) => gather_store_file_facts(file),
        StoreLocation::Etcd(etcd) => {
            let leader = coreward_control_server::server::leader_election::describe_leader(etcd)
                .map_err(|error| format!("{error:#}"));
            ControllerStoreFacts::Etcd { endpoints: etcd.endpoints.clone(), leader }
        }
    }
}

fn gather_store_file_facts(store: &Path) -> ControllerStoreFacts {
    let directory = parent_directory(store);
    let write_result =
        |path: &Path| nix::unistd::access(path, nix::unistd::AccessFlags::W_OK).map_err(|error| error.to_string());
    let problem = match store.metadata() {
        Ok(metadata) if !metadata.is_file() => Some("no file".to_owned()),
        Ok(_) => write_result(store).err(),
        Err(_) if !directory.is_dir() => Some(format!("{} is no directory", directory.display())),
        Err(_) => write_result(&directory).err().map(|error| format!("{}: {error}", directory.display())),
    };
    let problem = problem.or_else(|| find_free_space_problem(store, &directory));
    let permission_bits = store.metadata().ok().map(|metadata| metadata.permissions().mode() & 0o777);
    ControllerStoreFacts::Embedded { path: store.to_owned(), problem, permission_bits }
}

/// Returns a description of the problem if the disk has no room for the store's next transaction. A transaction may
/// need as much space as the file, because the store keeps the current pages until it is complete.
fn find_free_space_problem(store: &Path, directory: &Path) -> Option<String> {
    let needed_bytes = store.metadata().map_or(0, |metadata| metadata.len()).max(MIN_FREE_STORE_BYTES);
    // The controller does not run as root, so only blocks that every user may occupy count.
    let count_available_bytes =
        |status: statvfs::Statvfs| status.blocks_available().saturating_mul(status.fragment_size());
    let available_bytes_result = statvfs::statvfs(directory).map(count_available_bytes);
    match available_bytes_result {
        Ok(available) if available < needed_bytes => {
            Some(format!("the disk is full: {available} bytes are available, expected {needed_bytes}"))
        }
        // A quota becomes visible only when something is written.
        Ok(_) => try_write_unnamed_file(directory).err().map(|error| format!("{}: {error}", directory.display())),
        Err(error) => Some(format!("{}: {error}", directory.display())),
    }
}

/// Writes to an unnamed file in the directory, which the kernel deletes when it is closed. Succeeds without writing if
/// the file system does not support unnamed files.
fn try_write_unnamed_file(directory: &Path) -> io::Result<()> {
    let open_result = File::options().write(true).custom_flags(libc::O_TMPFILE).mode(0o600).open(directory);
    let write_result = open_result.and_then(|mut file| file.write_all(&[0; 1 << 16]).and_then(|()| file.sync_all()));
    match write_result {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detect_role_in_text(text: &str) -> Result<MachineRole, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        detect_role(file.path()).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn machine_role_is_detected_from_config_keys() {
        assert_eq!(
            detect_role_in_text("listen = \"x\"\nstore = \"y\"\n[[server]]\nname = \"s1\"\n"),
            Ok(MachineRole::Controller)
        );
        assert_eq!(detect_role_in_text("server = \"s1\"\ninterface = \"eth0\"\n"), Ok(MachineRole::Server));
        assert_eq!(detect_role_in_text("name = \"lb1\"\ninterface = \"eth0\"\n"), Ok(MachineRole::Lb));
        assert!(
            detect_role_in_text("name = \"lb1\"\n").unwrap_err().contains("expected the file of a daemon, or --role")
        );
        assert!(detect_role_in_text("name = ").is_err());
    }

    #[test]
    fn either_config_file_or_role_option_is_required() {
        let error = DoctorOptions::default().gather_settings().err().unwrap().to_string();
        assert!(error.contains("--role lb, server or controller"), "{error}");
        let cli_options = DoctorOptions {
            role: Some(MachineRole::Server),
            interface_override: Some("eth7".to_owned()),
            ..DoctorOptions::default()
        };
        assert_eq!(cli_options.gather_settings().unwrap().settings.interface.as_deref(), Some("eth7"));
    }

    #[test]
    fn problems_of_store_path_and_listen_address_are_detected() {
        let directory = tempfile::tempdir().unwrap();
        let find_listen_problem = || find_bind_problem("127.0.0.1:0".parse().unwrap());
        assert_eq!(find_listen_problem(), None);
        let store_problem_and_mode = |store: &Path| match gather_store_file_facts(store) {
            ControllerStoreFacts::Embedded { problem, permission_bits: mode, .. } => (problem, mode),
            ControllerStoreFacts::Etcd { .. } => unreachable!("a file is no etcd"),
        };
        let store_path = directory.path().join("store");
        assert_eq!(store_problem_and_mode(&store_path), (None, None));
        std::fs::write(&store_path, "").unwrap();
        std::fs::set_permissions(&store_path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(store_problem_and_mode(&store_path).1, Some(0o644));
        let missing_directory = directory.path().join("no/store");
        assert!(store_problem_and_mode(&missing_directory).0.unwrap().ends_with("/no is no directory"));
    }
}
