//! Command line and the daemon's file.

use std::fs::File;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use coreward_agent::config as agent;
use coreward_agent::rss::RssDevice;
use coreward_agent::rss::ethtool::EthtoolRss;
use coreward_agent::rss::testbed::TestbedRss;
use coreward_control_server::config::{ControllerConfig, StoreLocation};
use coreward_dataplane::lb::XdpMode;
use coreward_lb::config::Config as LbConfig;
use coreward_model::ServiceAddress;
use coreward_model::forwarding::Forwarding;
use coreward_tls::CredentialFiles;
use nix::sys::statvfs;

use super::{bind_problem, controller, directory_of};
use crate::facts::{ControllerFacts, Role, Service, Settings, StoreFacts};

/// Minimum free space for a store in bytes: redb creates a file of half this size.
const MIN_STORE_SPACE: u64 = 1 << 20;

#[derive(Debug, Clone, Default)]
pub struct CliOptions {
    pub config: Option<PathBuf>,
    /// Network device, which overrides that of the configuration file.
    pub interface: Option<String>,
    /// Role of the machine, if there is no configuration file.
    pub role: Option<Role>,
    /// Address of the controller, which overrides that of the configuration file.
    pub controller: Option<SocketAddr>,
    /// Services to check in addition to the controller's.
    pub services: Vec<ServiceAddress>,
}

pub(super) struct GatheredSettings {
    pub role: Role,
    pub settings: Settings,
    /// Name of this machine at the controller.
    pub machine_name: Option<String>,
    /// Files of the daemon's certificate.
    pub tls: Option<CredentialFiles>,
    pub rss: Option<Box<dyn RssDevice>>,
    pub services: Vec<Service>,
    pub controller_facts: Option<ControllerFacts>,
}

impl CliOptions {
    pub(super) fn read(&self) -> anyhow::Result<GatheredSettings> {
        let role = match (&self.config, self.role) {
            (_, Some(role)) => role,
            (Some(file), None) => role_of(file)?,
            (None, None) => {
                anyhow::bail!("neither a file nor a role: expected --config FILE, or --role lb, server or controller")
            }
        };
        let mut read = match &self.config {
            Some(file) => read_file(role, file)?,
            None => default_settings(role),
        };
        if let Some(interface) = &self.interface {
            read.settings.interface = Some(interface.clone());
            read.rss = None;
        }
        if let Some(controller) = self.controller {
            read.settings.controllers = vec![controller];
        }
        let named = |address: &ServiceAddress| Service {
            name: "service".to_owned(),
            address: *address,
            is_stamped_by_lb: false,
            is_stamped: true,
            forwarding: Forwarding::default(),
            sockets: None,
        };
        read.services = self.services.iter().map(named).collect();
        Ok(read)
    }
}

/// Returns the role of the daemon with this configuration file, by a key that files of other roles do not have.
fn role_of(file: &Path) -> anyhow::Result<Role> {
    let text = std::fs::read_to_string(file).with_context(|| format!("{}", file.display()))?;
    let table: toml::Table = text.parse().with_context(|| format!("{}", file.display()))?;
    let role = if table.contains_key("store") || table.contains_key("etcd") {
        Role::Controller
    } else if table.get("server").is_some_and(toml::Value::is_str) {
        Role::Server
    } else {
        ensure!(
            table.contains_key("interface"),
            "{}: neither `store` or [etcd] (a controller's), `server` (an agent's) nor `interface` (a load \
             balancer's): expected the file \
             of a daemon, or --role",
            file.display()
        );
        Role::Lb
    };
    Ok(role)
}

fn default_settings(role: Role) -> GatheredSettings {
    let settings = Settings {
        interface: None,
        pin_directory: None,
        controllers: Vec::new(),
        manage_timestamps: true,
        load_by_cpu_time: true,
        steer: agent::Steer::default(),
        xdp_mode: XdpMode::default(),
        announce_table: None,
    };
    GatheredSettings {
        role,
        settings,
        machine_name: None,
        tls: None,
        rss: None,
        services: Vec::new(),
        controller_facts: None,
    }
}

fn read_file(role: Role, file: &Path) -> anyhow::Result<GatheredSettings> {
    let read = default_settings(role);
    Ok(match role {
        Role::Lb => {
            let config = LbConfig::load(file)?;
            let settings = Settings {
                interface: Some(config.interface),
                pin_directory: Some(config.pin_directory),
                controllers: config.controllers.addresses().to_vec(),
                xdp_mode: config.xdp_mode,
                announce_table: config.announce.map(|announce| announce.table),
                ..read.settings
            };
            GatheredSettings { settings, machine_name: Some(config.name), tls: config.tls, ..read }
        }
        Role::Server => {
            let config = agent::Config::load(file)?;
            let rss: Box<dyn RssDevice> = match &config.rss {
                agent::Rss::Ethtool {} => Box::new(EthtoolRss::new(&config.interface)),
                agent::Rss::Testbed { path, entries } => {
                    Box::new(TestbedRss::new(path.clone(), &config.interface, *entries))
                }
            };
            let settings = Settings {
                interface: Some(config.interface),
                pin_directory: Some(config.pin_directory),
                controllers: config.controllers.addresses().to_vec(),
                manage_timestamps: config.manage_timestamps,
                load_by_cpu_time: matches!(config.load, agent::Load::Cpu {}),
                steer: config.steer,
                ..read.settings
            };
            GatheredSettings { settings, machine_name: Some(config.server), tls: config.tls, rss: Some(rss), ..read }
        }
        Role::Controller => {
            let config = ControllerConfig::load(file)?;
            let place = controller_facts(&config, gather_store_facts(&config.store));
            GatheredSettings { controller_facts: Some(place), tls: config.tls, ..read }
        }
    })
}

fn controller_facts(config: &ControllerConfig, store: StoreFacts) -> ControllerFacts {
    let listen_problem = bind_problem(config.listen);
    ControllerFacts {
        listen: config.listen,
        is_running: listen_problem.is_some() && controller::is_running(config),
        listen_problem,
        store,
    }
}

fn gather_store_facts(place: &StoreLocation) -> StoreFacts {
    match place {
        StoreLocation::Embedded(file) => store_file_facts(file),
        StoreLocation::Etcd(etcd) => {
            let leader = coreward_control_server::server::leader_election::describe_leader(etcd)
                .map_err(|error| format!("{error:#}"));
            StoreFacts::Etcd { endpoints: etcd.endpoints.clone(), leader }
        }
    }
}

fn store_file_facts(store: &Path) -> StoreFacts {
    let directory = directory_of(store);
    let writable =
        |path: &Path| nix::unistd::access(path, nix::unistd::AccessFlags::W_OK).map_err(|error| error.to_string());
    let problem = match store.metadata() {
        Ok(metadata) if !metadata.is_file() => Some("no file".to_owned()),
        Ok(_) => writable(store).err(),
        Err(_) if !directory.is_dir() => Some(format!("{} is no directory", directory.display())),
        Err(_) => writable(&directory).err().map(|error| format!("{}: {error}", directory.display())),
    };
    let problem = problem.or_else(|| space_problem(store, &directory));
    let mode = store.metadata().ok().map(|metadata| metadata.permissions().mode() & 0o777);
    StoreFacts::File { path: store.to_owned(), problem, mode }
}

/// Returns the reason why the disk has no room for the store's next transaction. It may need the size of the file
/// again, because the store keeps the pages in force.
fn space_problem(store: &Path, directory: &Path) -> Option<String> {
    let needed = store.metadata().map_or(0, |metadata| metadata.len()).max(MIN_STORE_SPACE);
    // The controller does not run as root: only blocks available to all users count.
    let available = |status: statvfs::Statvfs| status.blocks_available().saturating_mul(status.fragment_size());
    let outcome = statvfs::statvfs(directory).map(available);
    match outcome {
        Ok(available) if available < needed => {
            Some(format!("the disk is full: {available} bytes are available, expected {needed}"))
        }
        // A quota is visible only at a write.
        Ok(_) => probe_write(directory).err().map(|error| format!("{}: {error}", directory.display())),
        Err(error) => Some(format!("{}: {error}", directory.display())),
    }
}

/// Tries to write an unnamed file in a directory; the kernel deletes the file when it is closed. File systems that do
/// not support unnamed files are skipped.
fn probe_write(directory: &Path) -> io::Result<()> {
    let open = File::options().write(true).custom_flags(libc::O_TMPFILE).mode(0o600).open(directory);
    let written = open.and_then(|mut file| file.write_all(&[0; 1 << 16]).and_then(|()| file.sync_all()));
    match written {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => Ok(()),
        written => written,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn role(text: &str) -> Result<Role, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        role_of(file.path()).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn file_kind_follows_from_its_keys() {
        assert_eq!(role("listen = \"x\"\nstore = \"y\"\n[[server]]\nname = \"s1\"\n"), Ok(Role::Controller));
        assert_eq!(role("server = \"s1\"\ninterface = \"eth0\"\n"), Ok(Role::Server));
        assert_eq!(role("name = \"lb1\"\ninterface = \"eth0\"\n"), Ok(Role::Lb));
        assert!(role("name = \"lb1\"\n").unwrap_err().contains("expected the file of a daemon, or --role"));
        assert!(role("name = ").is_err());
    }

    #[test]
    fn file_or_role_is_required() {
        let error = CliOptions::default().read().err().unwrap().to_string();
        assert!(error.contains("--role lb, server or controller"), "{error}");
        let options =
            CliOptions { role: Some(Role::Server), interface: Some("eth7".to_owned()), ..CliOptions::default() };
        assert_eq!(options.read().unwrap().settings.interface.as_deref(), Some("eth7"));
    }

    #[test]
    fn store_location_is_required() {
        let directory = tempfile::tempdir().unwrap();
        let free = || bind_problem("127.0.0.1:0".parse().unwrap());
        assert_eq!(free(), None);
        let place = |store: &Path| match store_file_facts(store) {
            StoreFacts::File { problem, mode, .. } => (problem, mode),
            StoreFacts::Etcd { .. } => unreachable!("a file is no etcd"),
        };
        let store = directory.path().join("store");
        assert_eq!(place(&store), (None, None));
        std::fs::write(&store, "").unwrap();
        std::fs::set_permissions(&store, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(place(&store).1, Some(0o644));
        let nowhere = directory.path().join("no/store");
        assert!(place(&nowhere).0.unwrap().ends_with("/no is no directory"));
    }
}
