//! Settings for monitoring the agent: probes and metrics, the log, traces.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::SettingsError;

/// The default address of probes and metrics, which the DaemonSet's probes use.
const LISTEN: &str = "127.0.0.1:10475";

/// Probes and metrics.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MetricsSettings {
    /// See [`MetricsSettings::listen`].
    listen: String,
    /// Whether every attachment has counters of its own.
    pub per_pod: bool,
    /// Whether every attachment has the series that joins it with its network.
    pub attachment_info: bool,
}

/// The series that attachments have of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OfAttachments {
    /// Counters.
    pub(crate) counters: bool,
    /// The labels of the attachment.
    pub(crate) info: bool,
}

/// The log.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct LogSettings {
    /// Its form.
    pub format: LogFormat,
}

/// The form of the log's lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Time, level, module, message, and fields as `name=value`.
    #[default]
    Text,
    /// One JSON object.
    Json,
}

/// Traces of requests.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct TracesSettings {
    /// See [`TracesSettings::endpoint`].
    endpoint: String,
}

/// The collector of traces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Name or address.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// Path, with a leading slash.
    pub path: String,
}

impl Endpoint {
    /// Returns host and port, as in a URL.
    pub fn authority(&self) -> String {
        let Self { host, port, .. } = self;
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.authority(), self.path)
    }
}

impl TracesSettings {
    /// Returns where traces are sent. `None`: tracing is off.
    ///
    /// # Errors
    /// [`SettingsError::Traces`].
    pub fn endpoint(&self) -> Result<Option<Endpoint>, SettingsError> {
        if self.endpoint.is_empty() {
            return Ok(None);
        }
        let wrong = || SettingsError::Traces(self.endpoint.clone());
        let url: http::Uri = self.endpoint.parse().map_err(|_| wrong())?;
        let host = url.host().filter(|host| !host.is_empty()).ok_or_else(wrong)?;
        // Credentials would be sent unencrypted.
        let is_plain =
            url.scheme_str() == Some("http") && !self.endpoint.contains('@') && url.query().is_none();
        if !is_plain {
            return Err(wrong());
        }
        let path = if url.path() == "/" { "/v1/traces" } else { url.path() };
        Ok(Some(Endpoint {
            host: host.trim_matches(['[', ']']).to_owned(),
            port: url.port_u16().unwrap_or(4318),
            path: path.to_owned(),
        }))
    }
}

impl Default for MetricsSettings {
    fn default() -> Self {
        Self { listen: LISTEN.into(), per_pod: false, attachment_info: true }
    }
}

impl MetricsSettings {
    /// Returns the series that attachments have of their own.
    pub(crate) fn of_attachments(&self) -> OfAttachments {
        OfAttachments { counters: self.per_pod, info: self.attachment_info }
    }

    /// Returns where `/metrics`, `/livez` and `/readyz` are served. `None`: they are not served.
    ///
    /// # Errors
    /// [`SettingsError::Listen`].
    pub fn listen(&self) -> Result<Option<SocketAddr>, SettingsError> {
        if self.listen.is_empty() {
            return Ok(None);
        }
        let address = self.listen.parse().map_err(|_| SettingsError::Listen(self.listen.clone()));
        address.and_then(|address: SocketAddr| match address.port() {
            // A port chosen by the kernel would not be known to clients.
            0 => Err(SettingsError::Listen(self.listen.clone())),
            _ => Ok(Some(address)),
        })
    }
}

/// Returns the consequence for an agent's pod with the DaemonSet's probes. `None`: the probes are answered.
pub(crate) fn unprobed(address: Option<SocketAddr>) -> Option<String> {
    let is_at = |address: SocketAddr| {
        let is_reached = address.ip().is_unspecified() || address.ip() == IpAddr::V4(Ipv4Addr::LOCALHOST);
        is_reached && LISTEN.parse::<SocketAddr>().is_ok_and(|probed| probed.port() == address.port())
    };
    (!address.is_some_and(is_at)).then(|| {
        format!(
            "the probes of the DaemonSet ask {LISTEN}, and metrics.listen serves nothing there: unless they are others, the \
             kubelet restarts this agent every five minutes"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_says_that_its_probes_get_no_answer() {
        let found = |text: &str| {
            let settings = MetricsSettings { listen: text.into(), ..MetricsSettings::default() };
            unprobed(settings.listen().unwrap())
        };
        for answered in ["127.0.0.1:10475", "0.0.0.0:10475", "[::]:10475"] {
            assert_eq!(found(answered), None, "{answered}");
        }
        let said = "the probes of the DaemonSet ask 127.0.0.1:10475, and metrics.listen serves nothing there: unless they are \
                    others, the kubelet restarts this agent every five minutes";
        for missed in ["", "127.0.0.1:9000", "0.0.0.0:9000", "192.0.2.1:10475", "[::1]:10475"] {
            assert_eq!(found(missed).as_deref(), Some(said), "{missed}");
        }
    }

    #[test]
    fn traces_go_to_a_url_without_tls_and_credentials() {
        let endpoint = |text: &str| TracesSettings { endpoint: text.into() }.endpoint();
        assert_eq!(endpoint("").unwrap(), None);
        let table = [
            ("http://127.0.0.1", "http://127.0.0.1:4318/v1/traces"),
            ("http://collector:4000/", "http://collector:4000/v1/traces"),
            ("http://[::1]:4318/other", "http://[::1]:4318/other"),
        ];
        for (text, expected) in table {
            assert_eq!(endpoint(text).unwrap().unwrap().to_string(), expected);
        }
        for wrong in
            ["collector:4318", "https://collector", "http://u:p@collector", "http://", "http://a/?b=c", "x y"]
        {
            assert!(matches!(endpoint(wrong), Err(SettingsError::Traces(_))), "{wrong}");
        }
    }

    #[test]
    fn an_address_without_a_port_is_refused() {
        let listen =
            |text: &str| MetricsSettings { listen: text.into(), ..MetricsSettings::default() }.listen();
        assert_eq!(listen("").unwrap(), None);
        assert_eq!(listen("[::1]:9000").unwrap(), Some("[::1]:9000".parse().unwrap()));
        for wrong in ["127.0.0.1", ":10475", "localhost:10475", "127.0.0.1:0"] {
            assert!(matches!(listen(wrong), Err(SettingsError::Listen(_))), "{wrong}");
        }
    }
}
