//! Queries whether idle connections still have sockets. The controller relays them from load balancers to agents.

use std::net::SocketAddr;

use coreward_model::{ServerId, ServiceAddress};

use crate::address::{address_to_bytes, parse_address, parse_port, parse_server_id};
use crate::{WireError, WireErrorContext as _, v1};

/// Maximum number of clients in a socket query.
pub const MAX_CLIENTS_PER_SOCKET_QUERY: usize = 256;

/// Query by which a load balancer finds out for which clients of a service a server still has a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketQuery {
    /// Number that the load balancer assigned to the query.
    pub query_number: u64,
    /// Identifier of the load balancer's session at the controller.
    pub load_balancer_session: u64,
    /// Id of the server whose sockets are queried.
    pub server: ServerId,
    /// VIP, port and protocol of the connections' service.
    pub service: ServiceAddress,
    /// Addresses and ports of the clients, at most [`MAX_CLIENTS_PER_SOCKET_QUERY`] of them.
    pub clients: Vec<SocketAddr>,
}

/// Answer to a [`SocketQuery`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketAnswer {
    /// Number that the load balancer assigned to the query.
    pub query_number: u64,
    /// Identifier of the session of the load balancer that sent the query.
    pub load_balancer_session: u64,
    /// For each client of the query, whether the server has a socket. The list is empty if the server's agent is not
    /// connected.
    pub socket_exists_by_client: Vec<bool>,
}

impl SocketQuery {
    /// Returns the answer to this query for a server whose agent is not connected.
    pub fn to_absent_agent_answer(&self) -> SocketAnswer {
        self.to_answer(Vec::new())
    }

    /// Returns the answer to this query. `socket_exists` has the result for each client of the query, in the same
    /// order.
    pub fn to_answer(&self, socket_exists: Vec<bool>) -> SocketAnswer {
        SocketAnswer {
            query_number: self.query_number,
            load_balancer_session: self.load_balancer_session,
            socket_exists_by_client: socket_exists,
        }
    }
}

impl SocketAnswer {
    /// Returns whether the answer is empty because the server's agent was not connected.
    pub fn is_agent_absent(&self) -> bool {
        self.socket_exists_by_client.is_empty()
    }
}

impl From<&SocketQuery> for v1::SocketQuery {
    fn from(query: &SocketQuery) -> Self {
        let to_client_message =
            |client: &SocketAddr| v1::Client { address: address_to_bytes(client.ip()), port: client.port().into() };
        Self {
            number: query.query_number,
            load_balancer_session: query.load_balancer_session,
            server_id: query.server.get().into(),
            service: Some(query.service.into()),
            clients: query.clients.iter().map(to_client_message).collect(),
        }
    }
}

impl TryFrom<&v1::SocketQuery> for SocketQuery {
    type Error = WireError;

    fn try_from(message: &v1::SocketQuery) -> Result<Self, WireError> {
        check_client_count("clients", message.clients.len())?;
        let service = message.service.as_ref().ok_or_else(|| WireError::missing("service"))?;
        let parse_client = |(position, client): (usize, &v1::Client)| {
            let ip = parse_address("address", &client.address);
            let client_address = ip.and_then(|ip| Ok(SocketAddr::new(ip, parse_port("port", client.port)?)));
            client_address.with_field_prefix(format!("clients[{position}]"))
        };
        Ok(Self {
            query_number: message.number,
            load_balancer_session: message.load_balancer_session,
            server: parse_server_id("server_id", message.server_id)?,
            service: service.try_into().with_field_prefix("service")?,
            clients: message.clients.iter().enumerate().map(parse_client).collect::<Result<_, _>>()?,
        })
    }
}

impl From<SocketAnswer> for v1::SocketAnswer {
    fn from(answer: SocketAnswer) -> Self {
        Self {
            number: answer.query_number,
            load_balancer_session: answer.load_balancer_session,
            open: answer.socket_exists_by_client,
        }
    }
}

impl TryFrom<v1::SocketAnswer> for SocketAnswer {
    type Error = WireError;

    fn try_from(message: v1::SocketAnswer) -> Result<Self, WireError> {
        check_client_count("open", message.open.len())?;
        Ok(Self {
            query_number: message.number,
            load_balancer_session: message.load_balancer_session,
            socket_exists_by_client: message.open,
        })
    }
}

fn check_client_count(field: &str, length: usize) -> Result<(), WireError> {
    if length <= MAX_CLIENTS_PER_SOCKET_QUERY {
        return Ok(());
    }
    Err(WireError::new(field, format!("{length} entries: expected at most {MAX_CLIENTS_PER_SOCKET_QUERY}")))
}

#[cfg(test)]
mod tests {
    use coreward_model::tuple::TransportProtocol;

    use super::*;

    fn sample_query() -> SocketQuery {
        SocketQuery {
            query_number: 5,
            load_balancer_session: 7,
            server: 9.try_into().unwrap(),
            service: ServiceAddress {
                vip_and_port: "10.200.0.1:80".parse().unwrap(),
                protocol: TransportProtocol::Tcp,
            },
            clients: vec!["10.1.0.7:40000".parse().unwrap(), "10.1.0.8:1".parse().unwrap()],
        }
    }

    #[test]
    fn queries_and_answers_round_trip() {
        assert_eq!(SocketQuery::try_from(&v1::SocketQuery::from(&sample_query())), Ok(sample_query()));
        let answer = sample_query().to_answer(vec![true, false]);
        assert_eq!(SocketAnswer::try_from(v1::SocketAnswer::from(answer.clone())), Ok(answer));
    }

    #[test]
    fn invalid_query_is_rejected_with_its_field() {
        let error_after_change = |change: fn(&mut v1::SocketQuery)| {
            let mut message = v1::SocketQuery::from(&sample_query());
            change(&mut message);
            SocketQuery::try_from(&message).unwrap_err().to_string()
        };
        assert_eq!(error_after_change(|m| m.clients[1].port = 0), "clients[1].port: port 0: expected 1 to 65535");
        assert_eq!(
            error_after_change(|m| m.clients[0].address = vec![]),
            "clients[0].address: an address of 0 bytes: expected 4 (IPv4) or 16 (IPv6)"
        );
        assert_eq!(error_after_change(|m| m.service = None), "service: missing");
        assert_eq!(
            error_after_change(|m| m.clients = vec![m.clients[0].clone(); 257]),
            "clients: 257 entries: expected at most 256"
        );
        let answer = v1::SocketAnswer { open: vec![true; 257], ..Default::default() };
        assert_eq!(SocketAnswer::try_from(answer).unwrap_err().to_string(), "open: 257 entries: expected at most 256");
    }
}
