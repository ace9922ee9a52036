//! A testbed with one server whose agent runs inside the test process instead of as a command.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use coreward_agent::agent::Agent;
use coreward_agent::config::{AgentConfig, ConnectionSteeringMode, CoreLoadSourceConfig, RssSourceConfig};
use coreward_agent::report_state::SentReportState;
use coreward_model::ServerId;
use coreward_model::consistency::ServiceSettings;
use coreward_model::cookie::{CookieKey, CookieKeyIndex, FleetCookieKeys};
use coreward_model::rss::RssKey;
use coreward_model::tuple::{ServiceAddress, TransportProtocol};
use coreward_testbed::addresses::{HOST_DEVICE, SERVICE_ADDRESS, server_address};
use coreward_testbed::topology::{Testbed, TestbedOptions};
use coreward_wire::{AgentConfiguration, AgentService};
use socket2::{Domain, Socket, Type};

pub const CORE_COUNT: u16 = 4;
const CONDITION_TIMEOUT: Duration = Duration::from_secs(120);

pub fn create_testbed(instance_name: &str) -> anyhow::Result<Testbed> {
    let testbed = Testbed::create(TestbedOptions {
        instance_name: instance_name.to_owned(),
        server_count: 1,
        core_count: CORE_COUNT,
        ..TestbedOptions::default()
    })?;
    // The client needs a route, because no load balancer runs.
    let mut route_command = Command::new("ip");
    route_command.args([
        "route",
        "replace",
        &SERVICE_ADDRESS.ip().to_string(),
        "via",
        &server_address(1).to_string(),
        "dev",
        HOST_DEVICE,
    ]);
    testbed.run_command(testbed.client(), route_command)?;
    std::fs::write(busy_time_file_path(&testbed), [0; CORE_COUNT as usize * 8])?;
    Ok(testbed)
}

pub fn busy_time_file_path(testbed: &Testbed) -> std::path::PathBuf {
    testbed.directory().join("busy")
}

pub fn agent_config(testbed: &Testbed) -> AgentConfig {
    AgentConfig {
        server: "s1".to_owned(),
        controllers: SocketAddr::from(([127, 0, 0, 1], 7400)).into(),
        interface: HOST_DEVICE.to_owned(),
        pin_directory: testbed.pin_directory().join("agent"),
        manage_rss: true,
        manage_timestamps: true,
        steer: ConnectionSteeringMode::Order,
        load: CoreLoadSourceConfig::Published { path: busy_time_file_path(testbed) },
        rss: RssSourceConfig::Testbed { path: testbed.emulated_rss_pin_path(1), entries: 128 },
        metrics: None,
        tls: None,
        dispatch: None,
        decapsulate_from: None,
    }
}

pub fn test_server_id() -> ServerId {
    ServerId::try_from(4711).unwrap()
}

pub fn test_agent_configuration() -> AgentConfiguration {
    AgentConfiguration {
        generation: 1,
        services: vec![AgentService {
            name: "web".to_owned(),
            address: ServiceAddress { vip_and_port: SERVICE_ADDRESS.into(), protocol: TransportProtocol::Tcp },
            server_id: test_server_id(),
            settings: ServiceSettings::default(),
        }],
        keys: FleetCookieKeys {
            keys: [CookieKey { k0: 1, k1: 2 }, CookieKey { k0: 3, k1: 4 }],
            current_key_index: CookieKeyIndex::First,
        },
        report_interval: Duration::from_millis(50),
        fleet_rss_key: RssKey::microsoft_verification_key(),
        server_id: test_server_id(),
        previous_servers: Vec::new(),
        is_draining: false,
        address: None,
    }
}

pub fn reported_counter(agent: &mut Agent, name: &str) -> u64 {
    agent.build_next_report(&SentReportState::default(), &[]).expect("the core load file is there").counters[name]
}

/// Sends an HTTP GET request from the given source port of the client, and returns the body of the response.
pub fn http_get(testbed: &Testbed, path: &str, source_port: u16) -> anyhow::Result<String> {
    testbed.client().run_within(|| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.set_linger(Some(Duration::ZERO))?;
        socket.bind(&SocketAddr::from((testbed.client_address(0), source_port)).into())?;
        socket.connect_timeout(&SocketAddr::from(SERVICE_ADDRESS).into(), CONDITION_TIMEOUT)?;
        let mut client_stream = TcpStream::from(socket);
        client_stream.set_read_timeout(Some(CONDITION_TIMEOUT))?;
        write!(client_stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
        let mut response_text = String::new();
        client_stream.read_to_string(&mut response_text)?;
        let (_, body) =
            response_text.split_once("\r\n\r\n").with_context(|| format!("no answer but {response_text:?}"))?;
        Ok(body.to_owned())
    })
}

/// Waits until `is_met` returns true. After a timeout, fails with a message that contains `condition_name`.
pub fn wait_until(condition_name: &str, mut is_met: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    let deadline = Instant::now() + CONDITION_TIMEOUT;
    while !is_met()? {
        anyhow::ensure!(Instant::now() < deadline, "{condition_name}: not within {CONDITION_TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
