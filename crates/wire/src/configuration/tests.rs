use coreward_model::consistency::ConsistencyMode;
use coreward_model::cookie::CookieKeyIndex;
use coreward_model::tuple::TransportProtocol;

use super::*;
use crate::FleetConfigurationChange;

fn sample_keys() -> FleetCookieKeys {
    FleetCookieKeys {
        keys: [CookieKey { k0: 1, k1: 2 }, CookieKey { k0: 3, k1: 4 }],
        current_key_index: CookieKeyIndex::First,
    }
}

fn sample_server(id: u64) -> Server {
    Server {
        name: format!("s{id}"),
        id: id.try_into().unwrap(),
        address: IpAddr::from([10, 2, 0, id as u8]),
        is_eligible: id != 2,
        has_left: id == 2,
        weight: ServerWeight::new(id).unwrap(),
        capacity: (id == 2).then(|| ServerCapacity::new(2.5).unwrap()),
        vlan: Vlan::from_id_or_untagged(id - 1).unwrap(),
    }
}

fn sample_service(index: u32) -> Service {
    Service {
        name: format!("web{index}"),
        address: ServiceAddress {
            vip_and_port: format!("10.200.0.{index}:80").parse().unwrap(),
            protocol: TransportProtocol::Tcp,
        },
        index: ServiceIndex::new(index).unwrap(),
        settings: match index {
            0 => ServiceSettings { consistency: ConsistencyMode::Stateful, ..ServiceSettings::default() },
            _ => ServiceSettings { timestamps: CookieStamper::LoadBalancer, ..ServiceSettings::default() },
        },
        policy_name: "least".into(),
        telemetry_level: TelemetryLevel::Connections,
        time_key: (index > 0).then_some(CookieKey { k0: 5, k1: u64::MAX }),
        health_check: None,
        when_all_down: if index == 0 { AllServersDownTreatment::Drop } else { AllServersDownTreatment::FailOpen },
        servers: vec![sample_server(1), sample_server(2)],
    }
}

fn sample_configuration() -> FleetConfiguration {
    let sample_peer_load_balancer = |owner: Option<u32>, address: Option<[u8; 4]>| PeerLoadBalancer {
        name: format!("lb{owner:?}"),
        owner_number: owner.map(|number| u64::from(number).try_into().unwrap()),
        address: address.map(IpAddr::from),
        is_alive: address.is_some(),
    };
    FleetConfiguration {
        generation: 3,
        cookie_keys: sample_keys(),
        services: vec![sample_service(0), sample_service(63)],
        load_balancers: vec![
            sample_peer_load_balancer(Some(15), Some([10, 2, 0, 1])),
            sample_peer_load_balancer(Some(0), None),
            sample_peer_load_balancer(None, None),
        ],
        report_interval: Duration::from_millis(100),
        table_lifetime: Duration::from_secs(30),
    }
}

#[test]
fn fleet_change_turns_old_configuration_into_new_one() {
    let (old, mut new) = (sample_configuration(), sample_configuration());
    assert_eq!(FleetConfigurationChange::between_configurations((4, &old), (5, &new)).configuration.services, []);
    new.generation = 4;
    new.load_balancers[0].is_alive = false;
    new.services[1].servers[0].is_eligible = false;
    let mut new_service = new.services[0].clone();
    (new_service.index, new_service.name) = (ServiceIndex::new(7).unwrap(), "third".into());
    new_service.address.vip_and_port.set_port(81);
    new.services.push(new_service);
    new.services.remove(0);
    let change = FleetConfigurationChange::between_configurations((4, &old), (5, &new));
    assert_eq!(change.removed_service_indexes, [old.services[0].index]);
    let decoded_change = FleetConfigurationChange::decode(change.encode()).unwrap().0;
    assert_eq!((decoded_change.base_configuration_number, decoded_change.next_configuration_number), (4, 5));
    assert_eq!(decoded_change.apply_to(old), new);
    let encoded_change = FleetConfigurationChange::between_configurations((5, &new), (6, &new)).encode();
    assert!(encoded_change.len() < 200, "what is the same is not sent: {} bytes", encoded_change.len());
}

#[test]
fn configurations_round_trip() {
    assert_eq!(
        FleetConfiguration::try_from(&v1::FleetConfiguration::from(&sample_configuration())),
        Ok(sample_configuration())
    );
    assert_eq!(
        FleetConfiguration::decode(sample_configuration().encode(17)),
        Ok((17, sample_configuration(), Vec::new()))
    );
    let agent_configuration = AgentConfiguration {
        generation: 3,
        services: vec![AgentService {
            name: "web".into(),
            address: sample_configuration().services[0].address,
            server_id: 7.try_into().unwrap(),
            settings: ServiceSettings {
                consistency: ConsistencyMode::Beamer,
                timestamps: CookieStamper::Off,
                ..ServiceSettings::default()
            },
        }],
        keys: sample_keys(),
        report_interval: Duration::from_millis(100),
        fleet_rss_key: RssKey::microsoft_verification_key(),
        server_id: 7.try_into().unwrap(),
        previous_servers: vec![PreviousServer { id: 9.try_into().unwrap(), address: [10, 2, 0, 9].into() }],
        is_draining: true,
        address: Some("2001:db8::7".parse().unwrap()),
    };
    assert_eq!(
        AgentConfiguration::try_from(&v1::AgentConfiguration::from(&agent_configuration)),
        Ok(agent_configuration)
    );
}

/// The message comes from a newer controller. It has an unknown value in one service, and drains a server of that
/// service.
#[test]
fn unusable_service_is_drained_and_other_services_are_unaffected() {
    let mut message = v1::FleetConfiguration { number: 9, ..(&sample_configuration()).into() };
    let mode = message.services[1].mode.as_mut().unwrap();
    mode.settings.insert("consistency".into(), "quantum".into());
    message.services[1].servers[0].eligible = false;
    let (number, configuration, unusable_services) =
        FleetConfiguration::decode(message.encode_to_vec().into()).unwrap();
    assert_eq!((number, configuration.services.len(), configuration.cookie_keys), (9, 1, sample_keys()));
    let [rejected_service] = &unusable_services[..] else { panic!("{unusable_services:?}") };
    assert_eq!((rejected_service.name.as_str(), rejected_service.index), ("web63", 63));
    assert!(rejected_service.reason.to_string().contains("quantum"), "{}", rejected_service.reason);
    let previous_service = &sample_configuration().services[1];
    let effective_service = rejected_service.replace_servers_in(previous_service);
    assert!(!effective_service.servers[0].is_eligible);
    assert_eq!(Service { servers: previous_service.servers.clone(), ..effective_service }, *previous_service);

    let change = FleetConfigurationChange::between_configurations(
        (4, &sample_configuration()),
        (5, &FleetConfiguration { services: vec![], ..sample_configuration() }),
    );
    let mut message = v1::FleetChange::decode(change.encode()).unwrap();
    let mut unusable_service = v1::Service::from(previous_service);
    unusable_service.traffic = "smells".into();
    message.configuration.as_mut().unwrap().services.push(unusable_service);
    let (change, unusable_services) = FleetConfigurationChange::decode(message.encode_to_vec().into()).unwrap();
    assert_eq!((change.configuration.services.len(), unusable_services.len()), (0, 1));
}

/// Returns the error of parsing the sample configuration's message after `change` has modified it.
fn parse_error_after_change(change: fn(&mut v1::FleetConfiguration)) -> String {
    let mut message = v1::FleetConfiguration::from(&sample_configuration());
    change(&mut message);
    FleetConfiguration::try_from(&message).unwrap_err().to_string()
}

#[test]
fn errors_contain_the_path_of_the_invalid_field() {
    assert_eq!(
        parse_error_after_change(|m| m.services[1].servers[0].id = 16_384),
        "services[1].servers[0].id: server id 16384 is out of range: expected 0 to 16383, the 14 bits that a cookie \
         holds"
    );
    assert_eq!(
        parse_error_after_change(|m| m.services[1].servers[1].id = 1),
        "services[1].servers[1]: server id 1 is used twice: expected each once"
    );
    assert_eq!(
        parse_error_after_change(|m| m.services[0].index = 1024),
        "services[0].index: service index 1024: expected 0 to 1023"
    );
    assert_eq!(
        parse_error_after_change(|m| m.services[1].index = 0),
        "services[1]: index 0 is used twice: expected each once"
    );
    assert_eq!(parse_error_after_change(|m| m.services[1].address = None), "services[1].address: missing");
    assert_eq!(
        parse_error_after_change(|m| m.services[1].address = m.services[0].address.clone()),
        "services[1]: 10.200.0.0:80/tcp is used twice: expected each once"
    );
    assert_eq!(parse_error_after_change(|m| m.keys = None), "keys: missing");
    assert_eq!(parse_error_after_change(|m| m.services[0].mode = None), "services[0].mode: missing");
    assert_eq!(parse_error_after_change(|m| m.services[1].time_key = None), "services[1].time_key: missing");
    assert_eq!(
        parse_error_after_change(|m| m.services[1].traffic = "some".into()),
        "services[1].traffic: \"some\": expected one of nothing, connections, all"
    );
    assert_eq!(parse_error_after_change(|m| m.report_interval_ms = 0), "report_interval_ms: 0: expected at least 1");
}

#[test]
fn load_balancer_errors_contain_the_path_of_the_invalid_field() {
    assert_eq!(
        parse_error_after_change(|m| m.load_balancers[0].owner = Some(16)),
        "load_balancers[0].owner: owner number 16 is out of range: expected 0 to 15"
    );
    assert_eq!(
        parse_error_after_change(|m| m.load_balancers[0].owner = Some(0)),
        "load_balancers[1]: owner number 0 is used twice: expected each once"
    );
    assert_eq!(
        parse_error_after_change(|m| m.load_balancers[0].address = vec![1]),
        "load_balancers[0].address: an address of 1 bytes: expected 4 (IPv4) or 16 (IPv6)"
    );
    assert_eq!(
        parse_error_after_change(|m| m.load_balancers[1].name = m.load_balancers[0].name.clone()),
        "load_balancers[1]: lbSome(15) is used twice: expected each once"
    );
}
