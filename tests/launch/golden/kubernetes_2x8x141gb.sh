#!/usr/bin/env bash
# rlpipe launch: run arithmetic-seed1 on kubernetes_2x8x141gb (kubernetes), 2 nodes x 8 GPUs, of which the run uses 2
cd /project || exit
kubectl apply -f - <<'END'
apiVersion: v1
kind: ConfigMap
metadata:
  name: arithmetic-seed1
  namespace: training
  labels:
    app.kubernetes.io/name: rlpipe
data:
  config.yaml: |
    ...
---
apiVersion: ray.io/v1
kind: RayJob
metadata:
  name: arithmetic-seed1
  namespace: training
  labels:
    app.kubernetes.io/name: rlpipe
spec:
  entrypoint: rlpipe train /etc/rlpipe/config.yaml ray.address=auto ray.nodes=2 --requeued
  submissionMode: K8sJobMode
  shutdownAfterJobFinishes: true
  ttlSecondsAfterFinished: 600
  backoffLimit: 3
  submitterPodTemplate:
    metadata:
      labels:
        app.kubernetes.io/name: rlpipe
    spec:
      restartPolicy: Never
      automountServiceAccountToken: false
      securityContext:
        runAsNonRoot: true
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile:
          type: RuntimeDefault
        runAsUser: 1000
        runAsGroup: 1000
        fsGroup: 1000
      containers:
      - name: submitter
        image: rlpipe:gpu
        securityContext:
          allowPrivilegeEscalation: false
          capabilities:
            drop:
            - ALL
        resources:
          requests:
            cpu: 500m
            memory: 1Gi
          limits:
            cpu: '1'
            memory: 2Gi
  rayClusterSpec:
    rayVersion: 2.56.1
    headGroupSpec:
      rayStartParams:
        dashboard-host: 0.0.0.0
      template:
        metadata:
          labels:
            app.kubernetes.io/name: rlpipe
        spec:
          restartPolicy: Never
          automountServiceAccountToken: false
          securityContext:
            runAsNonRoot: true
            fsGroupChangePolicy: OnRootMismatch
            seccompProfile:
              type: RuntimeDefault
            runAsUser: 1000
            runAsGroup: 1000
            fsGroup: 1000
          containers:
          - name: rlpipe
            image: rlpipe:gpu
            securityContext:
              allowPrivilegeEscalation: false
              capabilities:
                drop:
                - ALL
            volumeMounts:
            - name: shared-memory
              mountPath: /dev/shm
            - name: configuration
              mountPath: /etc/rlpipe
              readOnly: true
            - name: shared
              mountPath: /shared
            resources:
              limits:
                cpu: '115'
                memory: 1710G
                nvidia.com/gpu: '8'
              requests:
                cpu: '115'
                memory: 1710G
                nvidia.com/gpu: '8'
            env:
            - name: RAY_JOB_STOP_WAIT_TIME_S
              value: '120'
            - name: NCCL_SOCKET_IFNAME
              value: eth0
            - name: GLOO_SOCKET_IFNAME
              value: eth0
            - name: HF_HOME
              value: /shared/huggingface
            envFrom:
            - secretRef:
                name: rlpipe
          volumes:
          - name: shared-memory
            emptyDir:
              medium: Memory
              sizeLimit: 64G
          - name: configuration
            configMap:
              name: arithmetic-seed1
          - name: shared
            persistentVolumeClaim:
              claimName: shared
          nodeSelector:
            nvidia.com/gpu.product: NVIDIA-H200
          tolerations:
          - key: nvidia.com/gpu
            operator: Exists
            effect: NoSchedule
          terminationGracePeriodSeconds: 120
    workerGroupSpecs:
    - groupName: nodes
      replicas: 1
      minReplicas: 1
      maxReplicas: 1
      rayStartParams: {}
      template:
        metadata:
          labels:
            app.kubernetes.io/name: rlpipe
        spec:
          restartPolicy: Never
          automountServiceAccountToken: false
          securityContext:
            runAsNonRoot: true
            fsGroupChangePolicy: OnRootMismatch
            seccompProfile:
              type: RuntimeDefault
            runAsUser: 1000
            runAsGroup: 1000
            fsGroup: 1000
          containers:
          - name: rlpipe
            image: rlpipe:gpu
            securityContext:
              allowPrivilegeEscalation: false
              capabilities:
                drop:
                - ALL
            volumeMounts:
            - name: shared-memory
              mountPath: /dev/shm
            - name: configuration
              mountPath: /etc/rlpipe
              readOnly: true
            - name: shared
              mountPath: /shared
            resources:
              limits:
                cpu: '115'
                memory: 1710G
                nvidia.com/gpu: '8'
              requests:
                cpu: '115'
                memory: 1710G
                nvidia.com/gpu: '8'
            env:
            - name: RAY_JOB_STOP_WAIT_TIME_S
              value: '120'
            - name: NCCL_SOCKET_IFNAME
              value: eth0
            - name: GLOO_SOCKET_IFNAME
              value: eth0
            - name: HF_HOME
              value: /shared/huggingface
            envFrom:
            - secretRef:
                name: rlpipe
          volumes:
          - name: shared-memory
            emptyDir:
              medium: Memory
              sizeLimit: 64G
          - name: configuration
            configMap:
              name: arithmetic-seed1
          - name: shared
            persistentVolumeClaim:
              claimName: shared
          nodeSelector:
            nvidia.com/gpu.product: NVIDIA-H200
          tolerations:
          - key: nvidia.com/gpu
            operator: Exists
            effect: NoSchedule
          terminationGracePeriodSeconds: 120
    authOptions:
      mode: token
END
