//! Configuration files and certificates of the daemons.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use coreward_model::consistency::{ConsistencyMode, CookieStamper};
use coreward_model::forwarding::ForwardingMode;
use coreward_tls::authority::{CertificateAuthority, CertificateValidity};
use coreward_tls::{FleetIdentity, FleetRole, IdentityName, TlsCredentialFiles};

use super::names::{
    controller_address, controller_address_in_family, controller_api_address, controller_name,
    rack_controller_listen_address,
};
use super::options::{CoreLoadSource, ServerAdminState, TestbedFleetOptions};
use crate::addresses::{
    AddressFamily, HOST_DEVICE, SERVICE_ADDRESS, load_balancer_address, load_balancer_name, rack_controller_name,
    server_address,
};
use crate::topology::Testbed;

/// Returns the path of server `number`'s core load file, which contains the busy times of a paced server's workers.
pub fn core_load_file_path(testbed: &Testbed, number: u16) -> PathBuf {
    testbed.directory().join(format!("busy-s{number}"))
}

pub(super) fn daemon_config_path(testbed: &Testbed, daemon: &str) -> PathBuf {
    testbed.directory().join(format!("{daemon}.toml"))
}

pub(super) fn write_controller_files(
    testbed: &Testbed,
    options: &TestbedFleetOptions,
    pool: &BTreeMap<u16, ServerAdminState>,
) -> anyhow::Result<()> {
    let store_path = options.store_file.clone().unwrap_or_else(|| testbed.directory().join("controller.redb"));
    let listen_line = format!("listen = \"{}\"\n", controller_address_in_family(options.control_address_family, 1));
    let token_directory = testbed.directory();
    let mut controller_config = format!("{listen_line}store = {store_path:?}\ntoken_directory = {token_directory:?}\n");
    if let Some(document) = &options.applied_document {
        for number in 1..=options.controller_count {
            if !options.etcd_endpoints.is_empty() {
                let (listen, endpoints, lease) =
                    (controller_address(number), &options.etcd_endpoints, options.leader_lease_s);
                // All controllers are on one machine, so each needs another port for its API.
                let api_address = controller_api_address(number);
                controller_config = format!(
                    "listen = \"{listen}\"\napi = \"{api_address}\"\ntoken_directory = {token_directory:?}\n\n[etcd]\n\
                     endpoints = {endpoints:?}\nlease = \"{lease}s\"\n"
                );
            }
            let tls_table = tls_config_table_or_empty(options.uses_tls, testbed, FleetRole::Controller, "controller");
            write_file(
                &daemon_config_path(testbed, &controller_name(number)),
                &(controller_config.clone() + &tls_table),
            )?;
        }
        return write_file(&daemon_config_path(testbed, "fleet"), document);
    }
    ensure!(options.controller_count == 1, "several controllers and a file of the fleet: expected `applied`");
    let text = match &options.shared_store_config {
        Some(store_config) => format!("{listen_line}token_directory = {token_directory:?}\n{store_config}"),
        None => controller_config + "fleet = \"fleet.toml\"\n",
    };
    let text = text + &tls_config_table_or_empty(options.uses_tls, testbed, FleetRole::Controller, "controller");
    write_file(&daemon_config_path(testbed, "controller"), &text)?;
    write_file(&daemon_config_path(testbed, "fleet"), &build_fleet_file_text(testbed, options, pool)?)
}

/// Returns the text of the fleet document, with the servers of the pool and a service for each VIP.
fn build_fleet_file_text(
    testbed: &Testbed,
    options: &TestbedFleetOptions,
    pool: &BTreeMap<u16, ServerAdminState>,
) -> anyhow::Result<String> {
    let mut text = format!("report_interval = \"{}ms\"\n", options.report_interval_ms);
    if options.makes_tables_per_interval {
        text += "table_updates = \"interval\"\n";
    }
    for (number, admin_state) in pool {
        let state_name = if *admin_state == ServerAdminState::Active { "active" } else { "draining" };
        let server_address_text = options.server_address_family.host_address(server_address(*number));
        write!(
            text,
            "\n[[server]]\nname = \"s{number}\"\naddress = \"{server_address_text}\"\nstate = \"{state_name}\"\n"
        )?;
        text += &vlan_config_line(testbed.server_vlan(*number));
        text += options.extra_text_by_server.get(number).map_or("", String::as_str);
    }
    for (index, vip) in testbed.vips().enumerate() {
        write_service_toml_table(&mut text, options, index, vip)?;
    }
    text += &options.extra_fleet_text;
    Ok(text)
}

fn write_service_toml_table(
    text: &mut String,
    options: &TestbedFleetOptions,
    index: usize,
    vip: IpAddr,
) -> fmt::Result {
    let (policy, vip) = (&options.policy_name, SocketAddr::new(vip, SERVICE_ADDRESS.port()));
    write!(text, "\n[[service]]\nname = \"web{index}\"\nvip = \"{vip}\"\npolicy = \"{policy}\"\n")?;
    if options.consistency != ConsistencyMode::default() {
        writeln!(text, "consistency = \"{}\"", options.consistency.name())?;
    }
    if options.timestamps != CookieStamper::default() {
        writeln!(text, "timestamps = \"{}\"", options.timestamps.name())?;
    }
    if options.forwarding != ForwardingMode::default() {
        writeln!(text, "forwarding = \"{}\"", options.forwarding.name())?;
    }
    Ok(())
}

fn vlan_config_line(vlan: u16) -> String {
    if vlan == 0 { String::new() } else { format!("vlan = {vlan}\n") }
}

pub(super) fn write_load_balancer_file(
    testbed: &Testbed,
    options: &TestbedFleetOptions,
    number: u16,
) -> anyhow::Result<()> {
    let name = load_balancer_name(number);
    let address = match options.control_address_family {
        AddressFamily::Ipv4 => String::new(),
        family => format!("address = \"{}\"\n", family.host_address(load_balancer_address(number))),
    };
    let load_balancer_config = format!(
        "name = \"{name}\"\ncontroller = {}\ninterface = \"{HOST_DEVICE}\"\npin_directory = \"{}\"\n\
         state_directory = \"{}\"\n{}",
        options.format_controller_list(),
        testbed.load_balancer_pin_directory(number).display(),
        testbed.directory().display(),
        vlan_config_line(testbed.vip_vlan())
            + &address
            + &options.extra_load_balancer_text
            + &tls_config_table_or_empty(options.uses_tls, testbed, FleetRole::Lb, &name),
    );
    write_file(&daemon_config_path(testbed, &name), &load_balancer_config)
}

pub(super) fn write_rack_controller_file(
    testbed: &Testbed,
    options: &TestbedFleetOptions,
    number: u16,
) -> anyhow::Result<()> {
    let (name, listen, controllers) =
        (rack_controller_name(number), rack_controller_listen_address(number), options.format_controller_list());
    let rack_controller_config = format!("name = \"{name}\"\nlisten = \"{listen}\"\ncontroller = {controllers}\n");
    write_file(
        &daemon_config_path(testbed, &name),
        &(rack_controller_config + &tls_config_table_or_empty(options.uses_tls, testbed, FleetRole::Rack, &name)),
    )
}

/// Returns a line for agents' files that lists the load balancers whose packets servers decapsulate. It is empty if
/// packets are not encapsulated.
fn decapsulation_config_line(testbed: &Testbed, options: &TestbedFleetOptions) -> String {
    if !options.forwarding.encapsulates() {
        return String::new();
    }
    let to_lb_address = |number| options.server_address_family.host_address(load_balancer_address(number)).to_string();
    let lb_addresses: Vec<String> = testbed.load_balancer_numbers().into_iter().map(to_lb_address).collect();
    format!("decapsulate_from = {lb_addresses:?}\n")
}

pub(super) fn write_agent_file(testbed: &Testbed, options: &TestbedFleetOptions, number: u16) -> anyhow::Result<()> {
    let load_line = match options.core_load_source {
        CoreLoadSource::Cpu => "{ source = \"cpu\" }".to_owned(),
        CoreLoadSource::PacedServer => {
            format!("{{ source = \"published\", path = \"{}\" }}", core_load_file_path(testbed, number).display())
        }
    };
    let steering_mode = if options.steers_connections { "order" } else { "off" };
    let agent_config = format!(
        "server = \"s{number}\"\ncontroller = {}\ninterface = \"{HOST_DEVICE}\"\npin_directory = \"{}\"\n\
         manage_rss = true\nmanage_timestamps = true\nsteer = \"{steering_mode}\"\nload = {load_line}\n\
         rss = {{ source = \"testbed\", path = \"{}\" }}\n{}{}",
        options.format_agent_controller_list(number),
        testbed.pin_directory().join(format!("agent-s{number}")).display(),
        testbed.emulated_rss_pin_path(number).display(),
        decapsulation_config_line(testbed, options),
        tls_config_table_or_empty(options.uses_tls, testbed, FleetRole::Agent, &format!("s{number}"))
            + &options.extra_agent_text,
    );
    write_file(&daemon_config_path(testbed, &format!("agent-s{number}")), &agent_config)
}

pub(super) fn testbed_fleet_name() -> anyhow::Result<IdentityName> {
    "testbed".parse().map_err(anyhow::Error::msg)
}

pub fn certificate_directory(testbed: &Testbed) -> PathBuf {
    testbed.directory().join("certs")
}

/// Returns the directory of a daemon's certificate and private key.
pub fn credential_directory(testbed: &Testbed, role: FleetRole, name: &str) -> PathBuf {
    certificate_directory(testbed).join(format!("{role}-{name}"))
}

/// Issues a daemon's ca.crt, own.crt and own.key, signed by the testbed's authority. Returns their directory. Fails
/// when there is no authority, or when files cannot be written.
pub fn issue_certificate(
    testbed: &Testbed,
    role: FleetRole,
    name: &str,
    fleet: &IdentityName,
    validity: CertificateValidity,
) -> anyhow::Result<PathBuf> {
    let authority = CertificateAuthority::open(&certificate_directory(testbed))?;
    let identity = FleetIdentity { fleet: fleet.clone(), role, name: name.parse().map_err(anyhow::Error::msg)? };
    let directory = credential_directory(testbed, role, name);
    authority.issue_certificate(&identity, &[], validity)?.write_files(&directory, &authority)?;
    Ok(directory)
}

/// Returns the table `[tls]` for a daemon's configuration file, or an empty text without TLS.
fn tls_config_table_or_empty(uses_tls: bool, testbed: &Testbed, role: FleetRole, name: &str) -> String {
    let TlsCredentialFiles { ca_path: ca, certificate_path: certificate, key_path: key } =
        credential_file_paths(testbed, role, name);
    if uses_tls { format!("[tls]\nca = {ca:?}\ncertificate = {certificate:?}\nkey = {key:?}\n") } else { String::new() }
}

/// Returns the paths of a daemon's certificate and key files, in its [`credential_directory`].
pub fn credential_file_paths(testbed: &Testbed, role: FleetRole, name: &str) -> TlsCredentialFiles {
    let credential_file_path = |file: &str| credential_directory(testbed, role, name).join(file);
    TlsCredentialFiles {
        ca_path: credential_file_path("ca.crt"),
        certificate_path: credential_file_path("own.crt"),
        key_path: credential_file_path("own.key"),
    }
}

fn write_file(path: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
