//! The server's certificate authority.

use std::net::IpAddr;
use std::sync::Arc;

use anyhow::Result;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

/// Signs the certificate of a server.
#[derive(Debug)]
pub(super) struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// Returns a new authority with its own key.
    ///
    /// # Errors
    /// The certificate cannot be made.
    pub(super) fn new() -> Result<Self> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        params.distinguished_name.push(DnType::CommonName, "the tests' API server");
        let pem = params.self_signed(&key)?.pem();
        Ok(Self { pem, issuer: Issuer::new(params, key) })
    }

    /// Returns its certificate in the form that clients get.
    pub(super) fn pem(&self) -> &str {
        &self.pem
    }

    /// TLS of a server at that address, `localhost` and `kubernetes.default.svc`.
    ///
    /// # Errors
    /// The certificate cannot be made.
    pub(super) fn server(&self, address: IpAddr) -> Result<Arc<ServerConfig>> {
        let key = KeyPair::generate()?;
        let names = vec![address.to_string(), "localhost".to_owned(), "kubernetes.default.svc".to_owned()];
        let certificate = CertificateParams::new(names)?.signed_by(&key, &self.issuer)?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        // Each connection presents the certificate, so that a client that trusts another authority notices at once.
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }
}
